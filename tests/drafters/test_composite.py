"""Drafters that combine: the law, enumerated and in whole texts, what is spared and caught up, and who is chosen."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
import torch
from specdec import AdaptiveDrafts, Composite, PromptLookupDrafter, SpeculativeDecoder, SuffixDrafter
from specdec.drafters import Copies, Drafts, composite
from specdec.drafters.composite import LONG_MATCH, by_match
from specdec.drafters.early_exit import EarlyExitDrafter
from specdec.evaluation.verify.chi_square import chi_square
from specdec.loop.draft_length import AdaptiveK, CopyResult, FixedK, RowResult, StepOutcome
from specdec.loop.shared_length import SharedK
from specdec.loop.step import AcceptRule
from support.exact import EXACT, FILTERS, Context, Probe, Rows, Setting, Step, arguments_of
from support.models import generate, prompts, tiny_model, toy_model, tunable_pair

from specdec_kernels import Rule, SamplingParams
from specdec_kernels.testing import completed, probabilities, text_distribution, total_variation

# ---- the law, enumerated ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Step:
    """What ``AcceptRule.verify`` reads of a step."""

    num_drafts: int
    allowed_on_device: torch.Tensor
    sampling: SamplingParams
    seed: torch.Tensor
    position: torch.Tensor
    log_probs: bool = False


@dataclasses.dataclass
class SharedStep(Step):
    """A step in which some texts are continued by copies: their q is one-hot, beside others that were drawn from q."""

    def copies(self, text: tuple[int, ...]) -> bool:
        return sum(text) % 2 == 1

    def drafts(self, probe, contexts):
        greedy = [
            c._replace(setting=dataclasses.replace(c.setting, temperature=0.0)) if self.copies(c.text) else c
            for c in contexts
        ]
        return super().drafts(probe, greedy)

    def verifier(self, probe, contexts, drafts):
        whole = arguments_of(contexts, drafts.owner)
        one_hot = torch.tensor([self.copies(c.text) for c in contexts])[drafts.owner]
        numbers = [torch.tensor([self.target.number(text) for _, text in contexts])[drafts.owner]]
        for token in drafts.tokens.unbind(1):
            numbers.append(numbers[-1] * self.target.base + token + 1)
        target, count = self.target.table[torch.stack(numbers, 1)], torch.full_like(drafts.owner, self.num_drafts)
        step = _Step(self.num_drafts, count, whole["params"], whole["seed"], whole["position"])
        stats = drafts.stack("cutoff"), drafts.stack("lse")
        given = Drafts(drafts.tokens, logits=torch.stack(drafts.logits, 1), stats=stats, one_hot=one_hot.tolist())

        def run(winner, u=None):
            probe.script(winner, u)
            out = AcceptRule(Rule(self.rule)).verify(step, target, given, None, None, "reference")
            # The drawn rows are verified first. A row's races are those of its own verification.
            both = len(probe.races) // 2
            probe.races = [
                a._replace(weights=torch.where(one_hot[:, None], b.weights, a.weights))
                for a, b in zip(probe.races[:both], probe.races[both:], strict=True)
            ]
            return out

        return run


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_batch_of_copies_and_draws_has_the_targets_distribution(monkeypatch, rule):
    """A step in float64 after each of a few texts, all in one batch. The text decides who drafts."""
    probe, settings = Probe(monkeypatch), [Setting(1.0), Setting(0.5, **FILTERS[-1]), Setting(2.0)]
    step = SharedStep(rule, Rows.random(3, 5, 5), Rows.random(3, 5, 6), 2, "stats")
    begin = [(i, text) for i in range(len(settings)) for text in ((), (0,), (1,), (2,))]
    for number, (i, text) in enumerate(begin):
        model = step.target_model(settings[i])
        contexts = [Context(settings[i], text) for i, text in begin]
        if number == 0:
            found = step.distributions(probe, contexts)
        expected = text_distribution(lambda more, text=text, model=model: model((*text, *more)), 3)
        own = completed(found[number], lambda more, text=text, model=model: model((*text, *more)), 3)
        assert abs(sum(found[number].values()) - 1) < EXACT
        assert total_variation(own, expected) < EXACT, (settings[i], text)


# ---- the law, in whole texts ------------------------------------------------------------------------------


def check_texts(rule: str, count: int, **settings) -> None:
    target, draft = toy_model(1), toy_model(2)
    params, prompt = SamplingParams(1.2, top_k=4), (1, 2, 3, 1, 2)
    decoder = SpeculativeDecoder(target, Composite([SuffixDrafter(), draft]), 2)
    result = decoder.generate(
        [list(prompt)] * count, max_new_tokens=4, params=params, seed=list(range(count)), rule=rule, eos_token_id=[]
    )
    assert result.drafter_error is None and result.stats.draft_forwards > 0

    def next_token(text):
        with torch.inference_mode():
            return probabilities(target(torch.tensor([text])).logits[0, -1].double(), 1.2, top_k=4)

    found = chi_square(Counter(map(tuple, result.tokens)), text_distribution(next_token, 4, prompt), level=1e-4)
    assert found.p_value > 1e-4 and found.detectable < 20 / count**0.5, found


@pytest.mark.parametrize(
    ("rule", "count"),
    [
        ("token", 4_000),
        ("block", 4_000),
        *(pytest.param(rule, 60_000, marks=pytest.mark.nightly) for rule in ("token", "block")),
    ],
)
def test_sampled_texts_have_the_distribution(monkeypatch, rule, count):
    """Matches of two tokens copy, so in most steps some rows copy and others draw."""
    monkeypatch.setattr(composite, "LONG_MATCH", 2)
    check_texts(rule, count)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_texts_are_those_of_plain_decoding(temperature):
    """Under ``coupled``, with a K that adapts, beside rows that repeat themselves and rows that do not."""
    target, draft = tunable_pair(0.3)
    params, ragged = SamplingParams(temperature), [*prompts(3, 2, 9), [5, 6, 7, 8, 9] * 4]
    settings = {"max_new_tokens": 40, "params": params, "seed": [1, 2, 3, 4], "rule": "coupled"}
    plain = generate(target, None, ragged, 0, **settings)
    for other in (draft, EarlyExitDrafter(target, 2)):
        for copier in (SuffixDrafter(), PromptLookupDrafter()):
            for k in (3, AdaptiveDrafts(costs=[1 + 0.1 * k for k in range(9)]), AdaptiveDrafts()):
                found = generate(target, Composite([copier, other]), ragged, k, **settings)
                assert found.tokens == plain.tokens and found.drafter_error is None and found.stats.accepted > 0


# ---- what is spared, and caught up ------------------------------------------------------------------------


def test_copies_spare_forwards_and_what_was_missed_is_read_later(monkeypatch):
    """The target is its own draft, so that whatever it drafts of a text that it knows is accepted."""
    monkeypatch.setattr(composite, "LONG_MATCH", 3)
    model, ragged = tiny_model(), prompts(3, 20, 30)
    first = generate(model, None, ragged, 0, max_new_tokens=24)
    # The text goes on as it does within the prompt, and then as nowhere before.
    again = [[*p, *t, *p] for p, t in zip(ragged, first.tokens, strict=True)]
    outcomes: list[StepOutcome] = []
    monkeypatch.setattr(FixedK, "observe", lambda self, step: outcomes.append(step))
    for batch in (again[:1], again):
        outcomes.clear()
        alone = generate(model, None, batch, 0, max_new_tokens=40)
        both = generate(model, Composite([SuffixDrafter(), model]), batch, 4, max_new_tokens=40)
        assert both.tokens == alone.tokens and both.drafter_error is None
        kinds = [(step.forwards > 0, row) for step in outcomes for row in step.results]
        drawn = [row for asked, row in kinds if asked and not row.one_hot and not row.ended]
        assert len(drawn) > 2 and all(row.accepted == row.asked for row in drawn)
        assert any(not step.forwards and step.width > 0 for step in outcomes)
    assert any(asked and row.one_hot for asked, row in kinds)


# ---- who is chosen ----------------------------------------------------------------------------------------


def test_without_anything_learned_the_length_of_the_match_decides():
    copies = Copies([[1, 2, 3], [1], [], [4]], [LONG_MATCH, LONG_MATCH - 1, LONG_MATCH, LONG_MATCH + 9])
    assert by_match(copies, [3, 3, 3, 0], False) == (3, [True, False, False, True])


def speed(copied: float, drafted: float, seed: int, kind: str) -> float:
    """Tokens in the time of a plain step. ``copied``: the share of stretches of the text that repeat; ``drafted``: the
    chance that a draft of the other drafter is right, which costs a fifth of a plain step."""
    draw, most, tokens, time, left, matched = random.Random(seed), 8, 0, 0.0, 0, 0
    lengths = {"shared": SharedK, "model": lambda d: AdaptiveK(d, False)}[kind](AdaptiveDrafts())
    for _ in range(1200):
        if left == 0:
            left, matched = int(draw.expovariate(1 / 20)) + 1, 0
            repeats = draw.random() < copied
        found = Copies([[1] * most if repeats and matched >= 2 else []], [matched if repeats else 0])
        if kind == "shared":
            share = lengths.share(1, 1, found, [most], False)
            k, copies = share.num_drafts, share.copying[0]
        else:
            k, copies = lengths.choose(1, 1, [most]), False
        asked = 0 if copies else k
        k = min(k, len(found.tokens[0])) if copies else k
        seconds = (1 + 0.03 * k + 0.2 * asked) * draw.lognormvariate(0, 0.03)
        accepted = min(left, k) if copies else next((i for i in range(k) if draw.random() >= drafted), k)
        copy = CopyResult(
            found.matched[0], found.tokens[0], [1] * min(left, accepted + 1) + [0] * (accepted + 1 > left)
        )
        row = RowResult(most if kind == "shared" else k, accepted, accepted + 1, False, copy)
        lengths.observe(StepOutcome(1, asked or k, k, [row], seconds, None, asked))
        emitted = accepted + 1
        tokens, time, left, matched = tokens + emitted, time + seconds, max(left - emitted, 0), matched + emitted
    return tokens / time


@pytest.mark.parametrize("drafted", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("copied", [0.0, 0.5])
def test_it_is_no_slower_than_the_other_drafter_alone(copied, drafted):
    """With times that have to be learned."""
    ratios = [speed(copied, drafted, s, "shared") / speed(copied, drafted, s, "model") for s in range(2)]
    assert min(ratios) > (1.2 if copied else 0.97), ratios


# ---- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drafters",
    [
        [SuffixDrafter()],
        [SuffixDrafter(), PromptLookupDrafter()],
        [tiny_model(), SuffixDrafter()],
        [SuffixDrafter(), Composite([SuffixDrafter(), tiny_model()])],
        [SuffixDrafter(), "model"],
    ],
)
def test_what_does_not_combine_is_refused(drafters):
    with pytest.raises(ValueError, match="drafters: got .*, allowed: two: one that copies"):
        Composite(drafters)


def test_trees_are_refused():
    with pytest.raises(ValueError, match="tree: got 8 with draft=Composite"):
        SpeculativeDecoder(tiny_model(), Composite([SuffixDrafter(), tiny_model()]), tree=8)
