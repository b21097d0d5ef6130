"""``specdec.evaluation.verify`` on tiny models: it passes where all is right, and finds what is planted."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import sys

import pytest
import specdec.evaluation.verify
import specdec.loop.step
import specdec.verify
import torch
from specdec import PromptLookupDrafter
from specdec.drafters import Drafter
from specdec.drafters.model import ModelDrafter
from specdec.evaluation.near_ties import Judge
from specdec.evaluation.verify import VerifySettings, cells, verify
from specdec.evaluation.verify.distributions import PlainDistribution, rank_tests, token_tests
from specdec.evaluation.verify.text_check import RaceNoise, TextCheck
from specdec.models.supported import cached_model
from support.commands import invoke, refused, run
from support.model_types import model_of
from support.models import VOCABULARY, generate, toy_model
from support.planted_steps import biased, shifted

from specdec_kernels import SamplingParams, speculative_step
from specdec_kernels.backends import reference

PROMPTS = [[1, 2, 3], [4], [0, 3, 1, 2], [2, 2]]  # of the toys, which have five tokens
QUICK = {"num_drafts": (3,), "batch_sizes": (4,), "max_new_tokens": 8, "samples": 800}


def verified(drafters=None, **settings):
    drafters = {"model": toy_model(2)} if drafters is None else drafters
    return verify(toy_model(1), drafters, PROMPTS, VerifySettings(**{**QUICK, **settings}))


def test_a_right_pair_passes():
    seen = []
    drafters, settings = {"model": toy_model(2), "lookup": PromptLookupDrafter(1, 1)}, {**QUICK, "batch_sizes": (1, 3)}
    done = verify(toy_model(1), drafters, PROMPTS, VerifySettings(**settings), lambda *call: seen.append(call))
    assert done.passed and done.never_accepted == []
    plan = cells({"none": None, **drafters}, VerifySettings(**settings))
    assert [r.cell for r in (*done.texts, *done.distributions)] == sorted(plan, key=lambda c: c.check == "distribution")
    assert seen[0] == (0, len(plan), "greedy: none, token, K = 0, B = 1")
    assert [call[0] for call in seen[1::2]] == [*range(1, len(plan) + 1)] and {call[1] for call in seen} == {len(plan)}
    for name in drafters:  # every drafter meets every rule, K and batch size
        mine = [c for c in plan if c.drafter == name and c.check == "greedy"]
        assert {c.rule for c in mine} == {"token", "block", "coupled"} and {c.batch_size for c in mine} == {1, 3}
    assert all(r.texts == 4 and 8 < r.tokens <= 32 and r.differing == r.unlike_plain == 0 for r in done.texts)
    for result in done.distributions:
        assert {(t.kind, t.position) for t in result.tests} >= {("ranks", i) for i in range(3)} | {("tokens", 0)}
        assert sum(t.level for t in result.tests) <= 1e-4 / len(done.distributions) * 1.001
        # Drafts count: the distribution is tested where some were accepted and some were not.
        assert result.cell.drafter == "none" or 0.05 < result.stats.alpha < 0.99
    assert any(t.position == 1 and t.kind == "tokens" and t.degrees > 1 for r in done.distributions for t in r.tests)
    json.dumps(done.to_dict(), allow_nan=False)


def test_a_coupled_text_has_its_prompts_seed_in_every_batch():
    assert verified({}, checks=("coupled",), batch_sizes=(1,)).passed


def test_what_follows_a_near_tie_is_judged_as_well(monkeypatch):
    """After a near-tie there is no other text to compare with, but a wrong token is still one."""
    check, rest = TextCheck(toy_model(1), PROMPTS, VerifySettings(**QUICK)), []
    monkeypatch.setattr(Judge, "rest", lambda self, prompt, text, start, *others: rest.append(start) or [bug])
    judge = Judge(toy_model(1))
    bug = judge.explain(PROMPTS[0], [0], [])
    tie = dataclasses.replace(bug, verdict="near-tie", position=2)
    monkeypatch.setattr(Judge, "explain", lambda *arguments: tie)
    cell, *_ = cells({"none": None}, VerifySettings(**{**QUICK, "checks": ("greedy",)}))
    assert check._judge(cell, 0, [1, 2, 3, 4], [1, 2, 4, 4]) == [tie, bug] and rest == [3]


# ---- planted bugs


class Liar(Drafter):
    """Its q is not what it drew from, but flatter: its favourites are accepted too often."""

    def __init__(self, drafter):
        self.drafter = drafter

    def start(self, batch):
        session = self.drafter.start(batch)
        honest = session.propose

        def propose(step):
            drafts = honest(step)
            return drafts if drafts.logits is None else drafts._replace(logits=drafts.logits * 0.5, stats=None)

        session.propose = propose
        return session


def sharp_bonus(logits, drafts, q, **kwargs):
    """The row after two accepted drafts is far too sure."""
    if logits.shape[1] > 2:
        logits = torch.cat((logits[:, :2], logits[:, 2:] * 2.5), 1)
    return speculative_step(logits, drafts, q, **kwargs)


def second_best(logits, drafts, q, **kwargs):
    """Every token after an accepted draft is the runner-up."""
    out = speculative_step(logits, drafts, q, **kwargs)
    if bool((kwargs["params"].temperature == 0).all()):
        for b, n in enumerate(out.num_accepted.tolist()):
            if n > 0:
                out.tokens[b, n] = logits[b, n].topk(2).indices[1]
    return out


def forgetful(logits, drafts, q, **kwargs):
    """A race without the position: the same noise at every token."""
    if kwargs["rule"] == "coupled":
        kwargs["position"] = torch.zeros_like(kwargs["position"])
    return speculative_step(logits, drafts, q, **kwargs)


@pytest.mark.parametrize(
    "step, where, settings",
    [
        (shifted, {"greedy", "coupled", "distribution"}, {"rules": ("token", "coupled"), "samples": 200}),
        (biased, {"distribution"}, {"rules": ("token",), "checks": ("distribution",)}),
        (sharp_bonus, {"distribution"}, {"rules": ("block",), "checks": ("distribution",), "samples": 1500}),
        (second_best, {"greedy"}, {"checks": ("greedy", "coupled")}),
        (forgetful, {"coupled"}, {"checks": ("greedy", "coupled")}),
    ],
)
def test_planted_bugs_are_found(monkeypatch, step, where, settings):
    monkeypatch.setattr(specdec.loop.step, "speculative_step", step)
    done = verified(**settings)
    assert not done.passed
    found = {r.cell.check for r in (*done.texts, *done.distributions) if r.bugs}
    assert where <= found and (found & {"greedy"} == where & {"greedy"})
    json.dumps(done.to_dict(), allow_nan=False)


def test_a_lying_q_is_found():
    """In the distribution alone: greedy texts do not depend on q."""
    done = verified(
        {"liar": Liar(ModelDrafter(cached_model(toy_model(2), "draft")))}, checks=("greedy", "distribution")
    )
    assert not any(r.error for r in (*done.texts, *done.distributions))
    found = {(r.cell.check, r.cell.drafter, r.cell.rule) for r in (*done.texts, *done.distributions) if r.bugs}
    assert found == {("distribution", "liar", "token"), ("distribution", "liar", "block")}


def test_a_drafter_that_fails_is_no_pass():
    class Failing(Drafter):
        def start(self, batch):
            raise RuntimeError("no weights")

    done = verified({"broken": Failing()}, checks=("greedy",))
    assert not done.passed and done.never_accepted == ["broken"]
    assert {r.error for r in done.texts if r.cell.drafter == "broken"} == {"RuntimeError: no weights"}
    assert not any(r.bugs for r in (*done.texts, *done.distributions))


@pytest.mark.parametrize("off, verdict", [(0.004, "near-tie"), (0.5, "bug")])
def test_only_rounding_is_certified(monkeypatch, off, verdict):
    """In bfloat16 two tokens of logits this far apart take turns: what chooses is the shape of a product. Here it is
    planted, for the loop alone."""
    target, draft = (copy.deepcopy(toy_model(seed)).to(torch.bfloat16) for seed in (1, 2))

    def swapping(logits, drafts, q, **kwargs):
        logits = logits.float()
        best = logits.topk(2, -1)
        near = best.values[..., :1] - best.values[..., 1:] < off
        second = torch.where(near, best.values[..., :1] + 0.5, best.values[..., 1:])
        return speculative_step(logits.scatter(-1, best.indices[..., 1:], second), drafts, q, **kwargs)

    monkeypatch.setattr(specdec.loop.step, "speculative_step", swapping)
    many = [[a, b] for a in range(5) for b in range(5)]
    settings = VerifySettings(**{**QUICK, "checks": ("greedy",), "rules": ("token",), "batch_sizes": (64,)})
    done = verify(target, {"model": draft}, many, settings)
    found = [d for r in done.texts for d in r.differences]
    assert done.difference_rate("greedy") > 0
    assert (verdict in {d.verdict for d in found}) and done.passed == (verdict == "near-tie")


# ---- its parts


def test_race_noise_is_that_of_the_reference_bit_for_bit():
    """The two share no code: one is written from docs/numerics.md, the other is the kernels' own."""
    ids = torch.arange(77)[None]
    for seed in (0, 1, -3, 2**40 + 7, 2**63 - 1, -(2**63)):
        for position in (0, 5, 2**31, 2**33 + 7):
            bits = reference.philox(torch.tensor([seed]), ids, torch.tensor([position]), 0, reference.RACE)
            expected = -torch.log(-torch.log1p(-reference.uniform(bits)))[0]
            assert torch.equal(RaceNoise(seed, 77)(position), expected)


def test_race_noise_is_that_of_the_kernels():
    """The largest logit plus noise is what rule ``coupled`` draws."""
    logits = torch.randn(6, 1, 77, generator=torch.Generator().manual_seed(0)) * 3
    for seed, position in ((0, 5), (-3, 900), (2**40 + 7, 0)):
        out = speculative_step(
            logits, torch.empty(6, 0, dtype=torch.int64), None, params=SamplingParams(0.7),
            seed=torch.full((6,), seed), position=torch.full((6,), position), rule="coupled",
        )  # fmt: skip
        noise = RaceNoise(seed, 77)(position)
        assert torch.equal(out.tokens[:, 0], (logits[:, 0].double() / 0.7 + noise).argmax(1))


@pytest.mark.parametrize("case", ["llama", "qwen3_5_text"])
def test_plain_distribution_is_that_of_full_forwards(case):
    target = model_of(case)
    distribution = PlainDistribution(target, [1, 2, 3], 0.8)
    log_p, error = distribution.after([(4, 5), (6, 7)])
    for row, text in zip(log_p, ((4, 5), (6, 7)), strict=True):
        logits = target(torch.tensor([[1, 2, 3, *text]])).logits[0, 2:].double()
        assert torch.allclose(row, (logits / 0.8).log_softmax(-1), atol=1e-5)
    assert log_p.shape == (2, 3, VOCABULARY) and 0 < error.max() < 1e-5
    assert distribution.after([()])[0].shape == (1, 1, VOCABULARY)


def test_wrong_texts_fail_tests_of_the_distribution():
    """Texts of temperature 0.7 are no texts of temperature 1; those of 1 are."""
    target = toy_model(1)
    distribution = PlainDistribution(target, PROMPTS[0], 1.0)
    for temperature, right in ((1.0, True), (0.7, False)):
        result = generate(
            target, None, [PROMPTS[0]] * 2000, 0, max_new_tokens=2, params=SamplingParams(temperature), seed=range(2000)
        )
        texts = [tuple(text) for text in result.tokens]
        ranks, tokens = rank_tests([texts], [distribution], 1e-6), token_tests([texts], 0, [distribution], 1e-6)
        assert all(t.passed for t in (*ranks, *tokens)) == right
        assert right or not ranks[1].passed


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rules": ()}, "rules: got \\(\\), allowed: at least one, each once"),
        ({"rules": ("typical",)}, "rule: got 'typical', allowed: 'token'"),
        ({"num_drafts": (0,)}, 'num_drafts: got 0, allowed: integers >= 1, or "auto"'),
        ({"batch_sizes": (4, 4)}, "batch_sizes: got \\(4, 4\\), allowed: at least one, each once"),
        ({"samples": 9}, "samples: got 9, allowed: an integer >= 100"),
        ({"temperature": 0.0}, "temperature: got 0.0, allowed: a finite number > 0"),
        ({"level": 1.0}, "level: got 1.0, allowed: a number between 0 and 1"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        VerifySettings(**settings)


def test_only_the_distribution_needs_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert verified({}, checks=("greedy",)).passed
    told = "got 'distribution' without scipy, allowed: it after pip install 'specdec-kernels[verify]', or other checks"
    with pytest.raises(ValueError, match=re.escape(f"checks: {told}")):
        verified({})
    monkeypatch.setattr("specdec.cli.models.load", lambda *_: pytest.fail("loaded"))
    assert f"--check: {told}" in refused("verify", "x")


def test_the_short_name():
    assert specdec.verify.verify is verify and specdec.verify.VerifySettings is VerifySettings
    assert specdec.verify.__all__ == specdec.evaluation.verify.__all__


def test_no_prompts():
    with pytest.raises(ValueError, match="prompts: got none, allowed: at least one"):
        verify(toy_model(1), {}, [])


# ---- the command

COMMAND = (
    "verify",
    "x = ",
    "y",
    "--samples",
    100,
    "--max-new-tokens",
    6,
    "-k",
    2,
    "--batch-size",
    2,
    "--rule",
    "token",
)


def test_the_command(folders):
    whole = json.loads(run(*COMMAND, *folders, "--drafter", "model", "--json").stdout)
    assert whole["passed"] is True and whole["difference_rate"] == {"greedy": 0.0, "coupled": 0.0}
    assert {r["drafter"] for r in whole["texts"]} == {"none", "model"}
    assert whole["never_accepted"] == ["model"]  # the folders' models have nothing in common
    shown = run(*COMMAND, *folders, "--check", "greedy").stdout
    assert "note: no draft of model was accepted" in shown
    assert "greedy texts: all 8 equal transformers'" in shown and "no bug found" in shown


def test_the_command_finds_bugs(folders, monkeypatch):
    monkeypatch.setattr(specdec.loop.step, "speculative_step", shifted)
    result = invoke(*COMMAND, *folders, "--drafter", "model", "--check", "greedy")
    assert result.exit_code == 1
    assert "bug: prompt 0, new token " in result.stdout and "bugs found" in result.stdout


@pytest.mark.parametrize(
    "args, message",
    [
        (("--drafter", "abacus"), "--drafter: got 'abacus', allowed: model, lookup, suffix, early-exit"),
        (("--drafter", "lookup", "--drafter", "lookup"), "--drafter: got lookup, lookup, allowed: each once"),
        (
            ("--drafter", "lookup", "--exit-layers", "2"),
            "--exit-layers: got 2 with --drafter lookup, allowed: an integer >= 1 with --drafter early-exit",
        ),
        (("--check", "speed"), "--check: got 'speed', allowed: greedy, coupled, distribution"),
        (("--rule", "typical"), "rule: got 'typical', allowed: 'token', 'block', 'coupled'"),
        (("-k", "0"), "--num-drafts: got 0, allowed: an integer >= 1, or auto"),
        (("-k", "two"), "--num-drafts: got two, allowed: an integer >= 1, or auto"),
        (("--samples", "5"), "--samples: got 5, allowed: an integer >= 100"),
        (("--batch-size", "0"), "--batch-size: got 0, allowed: an integer >= 1"),
        (("--level", "2"), "--level: got 2.0, allowed: a number between 0 and 1"),
        (("--target", "t", "--drafter", "model"), "--target / --draft: got --target without --draft, allowed: both"),
        (("--draft", "d"), "--target / --draft: got --draft without --target, allowed: both"),
    ],
)
def test_bad_options_are_named(args, message):
    assert message in refused("verify", "x", *args)
