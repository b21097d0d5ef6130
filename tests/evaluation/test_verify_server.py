"""``specdec verify --url`` passes a right server and finds what is planted in others."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest
import specdec.loop.step
import torch
from specdec import SpeculativeDecoder
from specdec.evaluation.near_ties import Judge
from specdec.evaluation.verify import ServerClient, ServerError, VerifySettings, verify_server
from specdec.evaluation.verify.distributions import PlainDistribution, rank_tests
from specdec.evaluation.verify.server_client import Answer, TokenReader
from specdec.serving.scheduler import Scheduler
from support.commands import invoke, refused
from support.completions_server import DecoderAnswers, completions_server
from support.models import toy_model
from support.planted_steps import biased, shared_noise, shifted
from support.servers import service, serving

from specdec_kernels import speculative_step

PROMPTS = [[1, 2, 3], [4], [0, 3, 1, 2], [2, 2]]  # of the toys, which have five tokens
SETTINGS = VerifySettings(checks=("greedy", "distribution"), max_new_tokens=6, samples=500, sampled_tokens=5)


@pytest.fixture
def answers(pair):
    """Of a toy with another one as its draft, of whose tokens a third is accepted."""
    return DecoderAnswers(SpeculativeDecoder(toy_model(1), toy_model(4), 3), pair[2])


class Direct(ServerClient):
    """Asks without a connection, for tests of many texts."""

    def __init__(self, answers):
        self._answers = answers
        super().__init__("http://direct", model="toy")

    def ask(self, path, body=None):
        return self._answers(body)[1]


def verified(answers, tokenizer, settings=SETTINGS, target=None, **more):
    with completions_server(answers) as url:
        return verify_server(ServerClient(url), target or toy_model(1), tokenizer, PROMPTS, settings, **more)


def test_a_right_server_passes(answers, pair):
    seen = []
    done = verified(answers, pair[2], progress=lambda *call: seen.append(call))
    assert done.passed and done.read_by == "ids" and done.prompts_as_ids and not done.refused
    assert done.texts == 4 and done.samples == 500 and not done.differences and 5 <= done.tokens <= 24
    assert {(t.kind, t.position) for t in done.tests} >= {(k, i) for k in ("ranks", "pairs", "tokens") for i in (0, 1)}
    assert sum(t.level for t in done.tests) <= done.level * 1.001
    assert all(t.detectable < 0.8 for t in done.tests if t.kind == "ranks" and t.position == 0)
    asked = [body for body in answers.bodies if body["max_tokens"] == 5]
    assert len(asked) == 500 and all(body["ignore_eos"] and body["top_p"] == 1 for body in asked)
    assert [call[0] for call in seen[-1:]] == [504] and seen[0] == (0, 504, "greedy texts")
    json.dumps(done.to_dict(), allow_nan=False)


@pytest.mark.parametrize("step", [biased, shifted])
def test_planted_bugs_are_found(step, answers, pair, monkeypatch):
    monkeypatch.setattr(specdec.loop.step, "speculative_step", step)
    settings = VerifySettings(**{**vars(SETTINGS), "samples": 1500 if step is biased else 500})
    done = verify_server(Direct(answers), toy_model(1), pair[2], PROMPTS, settings, 1)
    assert not done.passed and not done.errors
    assert any(d.verdict == "bug" for d in done.differences) == (step is shifted)
    assert any(not test.passed for test in done.tests)


@pytest.mark.parametrize("step", [speculative_step, shared_noise])
def test_noise_of_draft_and_recovery(step, pair, monkeypatch):
    """The bias is a total variation of 0.06 after this prompt, and hardly any after others: found in 5 of 5 runs of
    3000 texts with other seeds, where the right step passed 5 of 5; not found in 12,000 texts after PROMPTS."""
    monkeypatch.setattr(specdec.loop.step, "speculative_step", step)
    target = copy.deepcopy(toy_model(1))
    target.generation_config.eos_token_id = target.config.eos_token_id = None
    answers = DecoderAnswers(SpeculativeDecoder(target, toy_model(4), 3), pair[2])
    settings = VerifySettings(checks=("distribution",), samples=3000, sampled_tokens=2)
    done = verify_server(Direct(answers), target, pair[2], [[0, 3]], settings, 1)
    assert done.passed == (step is speculative_step) and not done.errors


def test_texts_that_end_are_no_pairs_of_dependent_ranks():
    """Whether a second token can be read depends on the first, whose rank is then not uniform among pairs."""
    allowed = torch.tensor([True, True, False, True, True])
    distribution = PlainDistribution(toy_model(1), [4, 4], 1.0)
    u = torch.rand(20000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first = (distribution.after([()])[0][0, 0].exp().cumsum(0) < u[:, :1]).sum(1)
    after = distribution.after([(token,) for token in range(5)])[0][:, 1].exp().cumsum(1)
    second = (after[first] < u[:, 1:]).sum(1)
    drawn = zip(first.tolist(), second.tolist(), strict=True)
    texts = [(a, b)[: 2 if allowed[b] else 1] for a, b in drawn if allowed[a]]
    given = PlainDistribution(toy_model(1), [4, 4], 1.0, allowed)
    assert min(t.p_value for t in rank_tests([texts], [given], 1e-6, pairs=True)) > 1e-3


@pytest.mark.nightly
def test_a_server_of_ours(pair):
    """The real one, which tells tokens by ``logprobs``, with a draft and batches."""
    target, draft, tokenizer = pair
    prompts = tokenizer(["def f(a, b):\n    return", "import os\nimport "]).input_ids
    settings = VerifySettings(checks=("greedy", "distribution"), max_new_tokens=5, samples=100, sampled_tokens=3)

    def make(drafter, rule):
        return Scheduler(SpeculativeDecoder(target, draft, 3), rows=4, max_length=64, rule="token")

    def ask(url):
        return verify_server(ServerClient(url), target, tokenizer, prompts, settings, 4)

    async def main():
        async with serving(service(make, tokenizer)) as (_, port):
            return await asyncio.to_thread(ask, f"http://127.0.0.1:{port}/v1/")

    done = asyncio.run(main())
    assert done.passed and done.read_by == "logprobs" and done.prompts_as_ids
    assert "repeat_penalty" in done.refused and "top_k" not in done.refused and done.samples == 100


def test_a_repeated_noise_is_found_by_pairs():
    """Texts whose second token is drawn with the noise of the first: each rank alone is uniform."""
    distribution = PlainDistribution(toy_model(1), [1, 2], 1.0)
    u = torch.rand(1500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first = (distribution.after([()])[0][0, 0].exp().cumsum(0) < u[:, None]).sum(1)
    after = distribution.after([(token,) for token in range(5)])[0][:, 1].exp().cumsum(1)
    texts = list(zip(first.tolist(), (after[first] < u[:, None]).sum(1).tolist(), strict=True))
    assert any(t.kind == "pairs" and not t.passed for t in rank_tests([texts], [distribution], 1e-6, pairs=True))


def test_a_law_of_allowed_tokens_is_the_models_given_these():
    allowed = torch.tensor([True, False, True, True, False])
    whole, given = (PlainDistribution(toy_model(1), [1], 0.9, mask).after([(0,)])[0] for mask in (None, allowed))
    p = whole.exp() * allowed
    assert torch.allclose(given.exp(), p / p.sum(-1, keepdim=True))


def test_a_margin_is_allowed_and_what_is_beyond_it_is_not(answers, pair):
    """A server of a slightly other model: its law differs, and how far is said."""
    other = copy.deepcopy(toy_model(1))
    with torch.no_grad():
        other.lm_head.weight[:] += 2.0 * torch.randn(
            other.lm_head.weight.shape, generator=torch.Generator().manual_seed(0)
        )
    done = verify_server(Direct(answers), other, pair[2], PROMPTS, SETTINGS, 1)
    assert done.largest_gap > 0 and any(d.verdict == "bug" for d in done.differences)
    assert max(t.variation for t in done.tests if t.kind == "ranks") > 0.05
    kind = VerifySettings(checks=("greedy",), max_new_tokens=6)
    assert verified(answers, pair[2], kind, other, margin=done.largest_gap).passed
    assert not verified(answers, pair[2], kind, other, margin=done.largest_gap * 0.9).passed


def test_margin_is_a_bound_of_near_ties():
    (wrong,) = Judge(toy_model(1)).rest([1], [int(toy_model(1)(torch.tensor([[1]])).logits[0, -1].argmin())], 0, "s")
    assert wrong.verdict == "bug"
    assert Judge(toy_model(1), margin=wrong.gap).rest([1], [wrong.tokens[1]], 0, "s")[0].verdict == "near-tie"


# ---- servers that tell less, or fail


def test_what_a_server_does_not_take_is_left_out(answers, pair):
    """Only texts as prompts, no top_k below 0, and neither ids nor logprobs of tokens."""
    tokenizer = pair[2]

    def narrow(body):
        if isinstance(body["prompt"], list) or body.get("top_k", 0) < 0 or body.keys() & {"logprobs", "typical_p"}:
            return 422, {"error": "no such field"}
        if body.pop("return_token_ids", False) or body.pop("return_tokens", False):
            return 400, {"error": "unknown"}
        return answers({**body, "prompt": tokenizer(body["prompt"]).input_ids})

    with completions_server(narrow) as url:
        client = ServerClient(url)
        client.probe([10, 11], tokenizer.decode([1, 2]))
        assert not client.takes_ids and client.fields["top_k"] == 0
        assert client.refused == ["typical_p", "return_token_ids", "return_tokens", "logprobs"]
        with pytest.raises(ServerError, match="tokens, the reference's tokenizer as 7"):
            client.complete([0] * 7, tokenizer.decode([1, 2]), 2, 0.0, 0)


def test_a_busy_server_is_asked_again_and_nothing_is_lost(answers, pair, monkeypatch):
    monkeypatch.setattr("specdec.evaluation.verify.server_client.time.sleep", lambda seconds: None)
    refused = set()

    def busy(body):
        again = body["seed"] in refused or body["max_tokens"] == 1
        refused.add(body["seed"])
        return answers(body) if again else (503, {"error": "busy"})

    done = verified(busy, pair[2], VerifySettings(checks=("distribution",), samples=100, sampled_tokens=2))
    assert done.passed and done.samples == 100


def test_what_came_before_a_server_fails_is_judged(answers, pair, monkeypatch):
    monkeypatch.setattr("specdec.evaluation.verify.server_client.time.sleep", lambda seconds: None)

    def failing(body):
        return (500, {"error": "broken"}) if body["temperature"] and body["seed"] >= 300 else answers(body)

    done = verified(failing, pair[2], VerifySettings(**{**vars(SETTINGS), "samples": 400}))
    assert not done.passed and not done.bugs and done.tests and 290 <= done.samples <= 300
    assert 10 <= len(done.errors) <= 18 and "answers 500 to /completions" in done.errors[0]


@pytest.mark.parametrize(
    "answer, message",
    [
        ((200, b"{"), "IncompleteRead"),
        ((200, {"choices": []}), "answers what is no completion"),
        ((401, {"error": "no key"}), "answers 401 to /completions: .*no key"),
    ],
)
def test_errors_are_told(answer, message, pair):
    with completions_server(lambda body: answer) as url, pytest.raises(ServerError, match=message):
        verify_server(ServerClient(url), toy_model(1), pair[2], PROMPTS, SETTINGS)


def test_tokens_by_their_texts(pair):
    """A part of a character, and what only pads the vocabulary, is where reading ends."""
    tokenizer = pair[2]
    whole, part = tokenizer("def f").input_ids, tokenizer("é").input_ids
    reader = TokenReader(tokenizer, len(tokenizer) + 2, [whole[-1]], "logprobs")
    names = [tokenizer.decode([token]) for token in whole]
    answer = Answer("", None, tuple(names), False, None, None)
    assert reader.read(answer) == (tuple(whole[:-1]), False)  # the last one is an end
    assert not reader.allowed[whole[-1]] and not reader.allowed[-1] and reader.allowed.sum() > 100
    if len(part) > 1:
        assert not reader.allowed[part].any()
    by_text = TokenReader(tokenizer, len(tokenizer), [], "text")
    assert by_text.read(Answer("def f", None, None, False, None, len(whole))) == (tuple(whole), True)
    assert by_text.read(Answer("def f", None, None, False, None, len(whole) + 1)) == ((), False)
    assert by_text.read(Answer("def f", None, None, True, None, len(whole) + 1)) == (tuple(whole), True)


# ---- the command


def test_the_command(folders, pair, monkeypatch):
    from specdec import load_model

    target = load_model(str(folders[1]))
    answers = DecoderAnswers(SpeculativeDecoder(target, None, 0), pair[2])
    quick = ("--max-new-tokens", 4, "--check", "greedy", "--reference", folders[1], "--api-key", "k")
    with completions_server(answers) as url:
        shown = invoke("verify", "def f", "x = ", "--url", url, *quick)
        assert shown.exit_code == 0 and "greedy texts: 0 of 8 tokens in 2 texts" in shown.stdout, shown.output
        whole = json.loads(invoke("verify", "def f", "--url", url, *quick, "--json").stdout)
        assert whole["passed"] is True and whole["read_by"] == "ids" and whole["largest_gap"] == 0
        sampled = ("--max-new-tokens", 2, "--samples", 100, "--reference", folders[1])
        table = invoke("verify", "def f(a):\n", "--url", url, *sampled)
        assert table.exit_code == 0 and "no bug found" in table.stdout and "finds" in table.stdout, table.output
        monkeypatch.setattr(specdec.loop.step, "speculative_step", worst)
        answers._decoded.clear()
        bad = invoke("verify", "def f", "--url", url, *quick)
        assert bad.exit_code == 1 and "bug: prompt 0, new token 0" in bad.stdout and "bugs found" in bad.stdout


def worst(logits, drafts, q, **kwargs):
    return speculative_step(-logits, drafts, q, **kwargs)


@pytest.mark.parametrize(
    "args, message",
    [
        (("--url", "localhost"), "--url: got 'localhost', allowed: the address of a server"),
        (("--url", "http://127.0.0.1:9"), "--url: http://127.0.0.1:9/v1: URLError"),
        (("--url", "http://x", "-k", "2"), "--num-drafts: got it with --url, allowed: none"),
        (("--url", "http://x", "--target", "t"), "--target: got it with --url, allowed: --reference"),
        (("--url", "http://x", "--check", "coupled"), "--check: got coupled with --url, allowed: greedy, distribution"),
        (("--reference", "t"), "--reference: got it without --url"),
        (("--url", "http://x", "--margin", "-1"), "--margin: got -1.0, allowed: a finite number >= 0"),
        (("--url", "http://x", "--at-once", "0"), "--at-once: got 0, allowed: an integer >= 1"),
    ],
)
def test_bad_options_are_named(args, message):
    assert message in refused("verify", *args)
