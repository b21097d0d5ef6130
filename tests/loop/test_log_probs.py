"""Ranks, most likely tokens and the log-probabilities of prompts, against full forwards of the target in float64."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
from specdec import FinishReason, Output, Request, Scheduler, SpeculativeDecoder, TokenLogProb
from specdec.loop import log_probs, sequence, step
from specdec.loop.graphs import StepGraphs
from specdec.loop.log_probs import MAX_TOP, read_scores, score
from specdec.models.forward import prefill
from specdec.models.forward.prefill import PrefillChunk
from support.crowds import scheduler
from support.models import VOCABULARY, generate, prompts, tiny_model, tunable_pair
from support.recorded import record
from transformers import NoRepeatNGramLogitsProcessor

from specdec_kernels import SamplingParams, validation

RULES = ("token", "block", "coupled")
SAMPLED = SamplingParams(0.9)


@functools.cache
def in_float64(model):
    return copy.deepcopy(model).double()


@torch.inference_mode()
def full_forward(model, tokens: list[int]) -> torch.Tensor:
    """[len(tokens) - 1, V] float64: the log-probabilities of each token but the first."""
    return in_float64(model)(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


def check(found: TokenLogProb, expected: torch.Tensor, token: int, top: int, within: float = 2e-4) -> None:
    """``found`` is right for ``token`` in this row [V] of float64 log-probabilities, but for near-ties."""
    own = expected[token].item()
    assert found.log_prob == pytest.approx(own, abs=within)
    assert (expected > own + within).sum() < found.rank <= (expected >= own - within).sum()
    assert len({token for token, _ in found.top}) == len(found.top) == top
    values = [value for _, value in found.top]
    assert values == pytest.approx(expected.topk(top).values.tolist(), abs=within)
    assert values == pytest.approx([expected[token].item() for token, _ in found.top], abs=within)
    assert values == sorted(values, reverse=True)
    if found.rank <= top:
        assert found.top[found.rank - 1] == (token, found.log_prob)


def check_text(target, prompt: list[int], tokens: list[int], found: list[TokenLogProb], top: int) -> None:
    rows = full_forward(target, prompt + tokens)[len(prompt) - 1 :]
    for each, row, token in zip(found, rows, tokens, strict=True):
        check(each, row, token, top)


def check_prompt(target, prompt: list[int], found: list[TokenLogProb | None], top: int) -> None:
    assert found[0] is None and len(found) == len(prompt)
    for each, row, token in zip(found[1:], full_forward(target, prompt), prompt[1:], strict=True):
        check(each, row, token, top)


# ---- scores of rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64))
@pytest.mark.parametrize("top", (0, 1, 5, MAX_TOP))
def test_scores_of_rows_with_ties(dtype, top):
    generator = torch.Generator().manual_seed(top)
    logits = torch.randn(70, 50, generator=generator).mul(2).round().to(dtype)  # about ten different values
    logits[3, 10:40] = -torch.inf
    logits[4], logits[5, ::2] = 0.0, -0.0
    tokens = torch.randint(50, (70,), generator=generator)
    tokens[3] = 20
    exact = logits.double().log_softmax(-1)
    order = exact.sort(dim=-1, descending=True, stable=True)  # equal ones keep the order of their ids
    scores = score(logits, tokens, top)
    assert scores.shape == (70, 2 + 2 * top)
    for found, row, values, ids, token in zip(read_scores(scores, top), exact, *order, tokens, strict=True):
        assert found.rank == 1 + ids.tolist().index(token)
        assert found.log_prob == pytest.approx(row[token].item(), abs=1e-5)
        least = min(top, int((row > -torch.inf).sum()))
        assert [i for i, _ in found.top] == ids[:least].tolist()
        assert [value for _, value in found.top] == pytest.approx(values[:least].tolist(), abs=1e-5)


def test_float64_tells_apart_what_float32_does_not():
    logits = torch.tensor([[0.0, 1e-12, -1.0]], dtype=torch.float64)
    (found,) = read_scores(score(logits, torch.tensor([0]), 2), 2)
    assert found.rank == 2 and [token for token, _ in found.top] == [1, 0]


def test_fewer_tokens_than_asked_for():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    (found,) = read_scores(score(logits, torch.tensor([0]), MAX_TOP), MAX_TOP)
    assert found.rank == 3 and [token for token, _ in found.top] == [1, 2, 0]
    (found,) = read_scores(score(logits, torch.tensor([0]), MAX_TOP), 1)
    assert [token for token, _ in found.top] == [1]


# ---- new tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_processor", (False, True))
@pytest.mark.parametrize("rule", RULES)
def test_of_new_tokens(rule, with_processor):
    """They are of the model's own logits, whatever filters, penalties, bias and processors make of these."""
    target, draft = tunable_pair(0.3)
    ragged, outputs = prompts(5, 1, 20, seed=4), []
    result = generate(
        target,
        draft,
        ragged,
        3,
        max_new_tokens=12,
        params=SamplingParams(torch.tensor([0.8, 0.0, 1.2, 0.9, 1.0]), top_k=40, top_p=0.9, repetition_penalty=1.2),
        seed=[1, 2, 3, 4, 5],
        eos_token_id=list(range(0, VOCABULARY, 8)),
        rule=rule,
        logit_bias={6: 1.5},
        logits_processor=[NoRepeatNGramLogitsProcessor(1)] if with_processor else None,
        top_log_probs=4,
        on_emit=outputs.append,
    )
    assert {len(t) for t in result.tokens} != {12} and result.prompt_log_probs is None
    for b, (prompt, tokens, found) in enumerate(zip(ragged, result.tokens, result.top_log_probs, strict=True)):
        check_text(target, prompt, tokens, found, 4)
        assert [each.log_prob for each in found] == result.raw_log_probs[b]
        assert len(result.log_probs[b]) == len(tokens)
        pieces = [each for each in outputs if each.number == b]
        for name in ("tokens", "log_probs", "raw_log_probs", "top_log_probs"):
            assert [x for each in pieces for x in getattr(each, name)] == getattr(result, name)[b]


def test_greedy_tokens_are_the_most_likely():
    result = generate(*tunable_pair(0.3), prompts(2, 3, 9), max_new_tokens=12, top_log_probs=1)
    for tokens, found in zip(result.tokens, result.top_log_probs, strict=True):
        assert [each.rank for each in found] == [1] * 12
        assert [each.top for each in found] == [[(token, x.log_prob)] for token, x in zip(tokens, found, strict=True)]


def test_only_what_is_asked_for_is_there():
    pair, asked = tunable_pair(0.3), prompts(2, 3, 9)
    outputs: list[Output] = []
    result = generate(*pair, asked, max_new_tokens=3, on_emit=outputs.append)
    names = ("log_probs", "raw_log_probs", "top_log_probs")
    assert {getattr(each, name) for each in (result, *outputs) for name in names} == {None}
    assert result.prompt_log_probs is None
    result = generate(*pair, asked, max_new_tokens=3, prompt_log_probs=0)
    assert {getattr(result, name) for name in names} == {None} and result.prompt_log_probs is not None
    ranks = generate(*pair, asked, max_new_tokens=3, top_log_probs=0)
    assert all(each.top == [] and each.rank == 1 for own in ranks.top_log_probs for each in own)
    assert ranks.log_probs == [[0.0] * 3] * 2


@pytest.mark.parametrize("name", ("top_log_probs", "prompt_log_probs"))
@pytest.mark.parametrize("given", (-1, MAX_TOP + 1, True, 2.0))
def test_refused(name, given):
    with pytest.raises(ValueError, match=f"{name}: got {given}, allowed: "):
        generate(*tunable_pair(0.3), [[1, 2]], max_new_tokens=1, **{name: given})
    with pytest.raises(ValueError, match=f"{name}: got {given}, allowed: "):
        scheduler().submit(Request([1, 2], 1, **{name: given}))
    with pytest.raises(ValueError, match="log_probs: got 3, allowed: True or False"):
        scheduler().submit(Request([1, 2], 1, log_probs=3))


# ---- prompts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("llama", "gpt2", "gemma3", "bloom"))
def test_of_prompts(kind):
    """Ragged ones, one of a single token, with text after them or not; the text stays as it is."""
    target = tiny_model(kind)
    ragged = [*prompts(3, 9, 30, seed=2), [7]]
    result = generate(target, None, ragged, max_new_tokens=3, prompt_log_probs=3)
    alone = generate(target, None, ragged, max_new_tokens=0, prompt_log_probs=3)
    for b, prompt in enumerate(ragged):
        check_prompt(target, prompt, result.prompt_log_probs[b], 3)
        check_prompt(target, prompt, alone.prompt_log_probs[b], 3)
    assert alone.tokens == [[]] * 4
    assert result.tokens == generate(target, None, ragged, max_new_tokens=3).tokens


def test_padding_is_left_out_and_copies_have_the_same():
    target, draft = tunable_pair(0.3)
    ragged = prompts(3, 1, 9, seed=8)
    longest = max(map(len, ragged))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in ragged])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in ragged])
    settings = {"max_new_tokens": 2, "params": SAMPLED, "num_return_sequences": 2}
    result = generate(target, draft, ids, attention_mask=mask, prompt_log_probs=2, **settings)
    assert len(result.prompt_log_probs) == 6
    for row, found in enumerate(result.prompt_log_probs):
        check_prompt(target, ragged[row // 2], found, 2)


def test_logits_of_a_prompt_are_never_all_there(monkeypatch):
    target = tiny_model("llama")
    ragged, sizes = prompts(2, 20, 40, seed=3), []
    monkeypatch.setattr(prefill, "LOGITS_TOKENS", 8)
    handle = target.lm_head.register_forward_hook(lambda module, given, logits: sizes.append(logits.shape[:-1].numel()))
    try:
        result = generate(target, None, ragged, max_new_tokens=0, prompt_log_probs=1)
    finally:
        handle.remove()
    assert max(sizes) == 8 and sum(sizes) >= 2 * (max(map(len, ragged)) - 1)
    for prompt, found in zip(ragged, result.prompt_log_probs, strict=True):
        check_prompt(target, prompt, found, 1)


def test_no_head_for_a_prompt_that_does_not_ask():
    target, calls = tiny_model("llama"), []
    handle = target.lm_head.register_forward_hook(lambda *_: calls.append(1))
    try:
        generate(target, None, prompts(1, 9, 9), max_new_tokens=1)
    finally:
        handle.remove()
    assert len(calls) == 1


def test_memory_runs_out_between_two_rows(monkeypatch):
    """The chunk is read again in halves, and no token is scored twice."""
    target, calls = tiny_model("llama"), []
    ragged = prompts(2, 12, 30, seed=6)

    def scarce(logits, tokens, top):
        calls.append(len(logits))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(logits, tokens, top)

    monkeypatch.setattr(sequence, "score", scarce)
    with pytest.warns(RuntimeWarning, match="out of memory in prefill"):
        result = generate(target, None, ragged, max_new_tokens=0, prompt_log_probs=1)
    assert len(calls) == 4 and sum(calls[2:]) == calls[1]  # the first row's had come
    for prompt, found in zip(ragged, result.prompt_log_probs, strict=True):
        check_prompt(target, prompt, found, 1)


# ---- requests ----------------------------------------------------------------------------------------------

ASKED = (
    {"top_log_probs": 2, "prompt_log_probs": 1},
    {},
    {"log_probs": True},
    {"top_log_probs": 0},
    {"prompt_log_probs": 3},
    {"top_log_probs": MAX_TOP},
)


def requests(asked=ASKED, new: int = 8) -> list[Request]:
    """Sampled requests of which each asks for other log-probabilities."""
    texts = prompts(len(asked), 1, 14, seed=11)
    return [
        Request(text, new + i % 3, SAMPLED, seed=i, eos_token_id=[], id=i, **own)
        for i, (text, own) in enumerate(zip(texts, asked, strict=True))
    ]


def told(outcome) -> tuple:
    return (
        outcome.tokens,
        outcome.log_probs,
        outcome.raw_log_probs,
        outcome.top_log_probs,
        outcome.prompt_log_probs,
    )


def test_in_a_crowd_as_alone():
    target, _ = tunable_pair(0.5, layers=1)
    crowd = {o.request.id: o for o in scheduler().run(requests())}
    silent = {o.request.id: o.tokens for o in scheduler().run(requests(({},) * 6))}
    for request, asked in zip(requests(), ASKED, strict=True):
        outcome, (alone,) = crowd[request.id], scheduler().run([request])
        assert outcome.finish_reason == FinishReason.LENGTH and outcome.tokens == silent[request.id]
        assert told(outcome) == told(alone)
        top, of_prompt = asked.get("top_log_probs"), asked.get("prompt_log_probs")
        emitted = top is not None or "log_probs" in asked
        assert (outcome.log_probs is not None) == (outcome.raw_log_probs is not None) == emitted
        assert (outcome.top_log_probs is not None) == (top is not None)
        assert (outcome.prompt_log_probs is not None) == (of_prompt is not None)
        if top is not None:
            check_text(target, request.prompt, outcome.tokens, outcome.top_log_probs, top)
        if of_prompt is not None:
            check_prompt(target, request.prompt, outcome.prompt_log_probs, of_prompt)
        if emitted:
            rows = full_forward(target, request.prompt + outcome.tokens)[len(request.prompt) - 1 :]
            expected = rows.gather(1, torch.tensor(outcome.tokens)[:, None])[:, 0].tolist()
            assert outcome.raw_log_probs == pytest.approx(expected, abs=2e-4)


def test_nothing_is_computed_for_those_who_do_not_ask(monkeypatch):
    seen, verify = [], step.speculative_step
    monkeypatch.setattr(log_probs, "score", lambda logits, *more: seen.append(logits.shape[0]) or score(logits, *more))
    monkeypatch.setattr(step, "speculative_step", lambda *a, **k: seen.append(k["log_probs"]) or verify(*a, **k))
    monkeypatch.setattr(sequence, "score", lambda *_: pytest.fail("of a prompt"))
    list(scheduler().run(requests(({},) * 3)))
    assert {*seen} == {False}
    seen.clear()
    list(scheduler().run(requests(({}, {"log_probs": True}, {}))))
    assert {*seen} <= {False, True} and True in seen
    seen.clear()
    list(scheduler().run(requests(({}, {"top_log_probs": 1}, {}))))
    assert {x for x in seen if not isinstance(x, bool)} == {4}  # one row of K + 1 = 4 positions


def test_a_prompt_alone():
    """max_new_tokens = 0: read, scored, and ended; beside requests that decode."""
    target, _ = tunable_pair(0.5, layers=1)
    texts = prompts(3, 1, 14, seed=1)
    s = scheduler()
    others = [s.submit(Request(text, 5, SAMPLED, eos_token_id=[])) for text in texts]
    numbers = [s.submit(Request(text, 0, prompt_log_probs=2)) for text in texts]
    outcomes = {o.number: o for o in s.run(())}
    assert [len(outcomes[number].tokens) for number in others] == [5, 5, 5]
    for number, text in zip(numbers, texts, strict=True):
        outcome = outcomes[number]
        assert (outcome.tokens, outcome.finish_reason, outcome.log_probs) == ([], FinishReason.LENGTH, None)
        check_prompt(target, text, outcome.prompt_log_probs, 2)
    assert s.idle and s.usage.cache_tokens_used == 0


def test_cancelled_while_its_prompt_is_read():
    """What was read by then is there."""
    target, _ = tunable_pair(0.5, layers=1)
    (text,) = prompts(1, 14, 14)
    s = scheduler()  # reads 4 tokens in a step
    number = s.submit(Request(text, 5, prompt_log_probs=1))
    s.step()
    assert s.cancel(number)
    (output,) = s.step()
    assert output.finish_reason == FinishReason.CANCELLED
    check_prompt(target, text[:5], output.sequence.prompt_log_probs, 1)


@pytest.mark.parametrize("async_scheduling", (False, True))
def test_replayed_steps(monkeypatch, async_scheduling):
    """Log-probabilities travel in the report, so a step that computes them is a graph as well, and runs ahead."""
    monkeypatch.setattr(validation, "check_counts", lambda *values: None)  # nor are they read on a GPU
    decoder = SpeculativeDecoder(*tunable_pair(0.5, layers=1), num_drafts=3)
    outcomes = []
    for graphs in (None, StepGraphs(capture=record, allocated=lambda: 0)):
        s = Scheduler(decoder, rows=3, max_length=40, prefill_chunk=4, async_scheduling=async_scheduling)
        s.batch.config = replace(s.batch.config, graphs=graphs)
        outcomes.append({o.request.id: told(o) for o in s.run(requests(new=12))})
        if graphs is not None:
            assert graphs.replays > 10
            assert s.batch.runs_ahead
    assert outcomes[0] == outcomes[1]


def test_chunks_do_not_matter():
    """But for rounding."""
    target = tiny_model("llama")
    (text,) = prompts(1, 40, 40)
    decoder = SpeculativeDecoder(target, None, 0)
    decoder.target.prefill_chunk = PrefillChunk(7)
    (found,) = decoder.generate([text], max_new_tokens=0, prompt_log_probs=2).prompt_log_probs
    check_prompt(target, text, found, 2)
