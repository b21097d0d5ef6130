"""Masks: a token whose bit in ``allowed`` is 0 counts as if its logit were -inf, in p, and in q where drafts were drawn
under the same mask. test_exact.py has the distributions, test_texts.py whole texts, test_parity.py every backend
against the reference."""

from __future__ import annotations

import pytest
import torch
from support.arrangements import INF, NAN, drafted, identical, rules_for, seeds, step

from specdec_kernels import Status
from specdec_kernels.ops import RULES, WORD_BITS
from specdec_kernels.testing import StepInputs, bits_of, random_step

MASKED = 2  # of three drafts
CASES = {
    "full": {"vocabulary": 33},
    "filters": {"vocabulary": 1100, "stats": True, "top_k": (0, 5), "top_p": (0.9, 1.0)},
    "reduced": {"vocabulary": 1100, "reduced": 700, "table": 9, "frequency_penalty": 0.4, "log_probs": True},
    "one_hot": {"vocabulary": 40, "kind": "one_hot", "table": 9, "dtype": torch.bfloat16},
}


def inputs_of(case: str, rule: str, **more) -> StepInputs:
    options = {"allowed": 0.4, "masked_drafts": MASKED, "temperature": (0.7, 1.3, 0.0), **CASES[case], **more}
    return random_step(3, 3, rule=rule, **options)


def tokens_of(words: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Bool [..., V] of bits [..., W]."""
    return (words[..., None] >> torch.arange(WORD_BITS) & 1).flatten(-2)[..., :vocabulary].bool()


def masked_by_hand(inputs: StepInputs) -> StepInputs:
    """The same with -inf among the logits instead of bits."""
    allowed = tokens_of(inputs.allowed, inputs.target_logits.shape[-1])
    draft = inputs.draft_logits
    if draft is not None:
        of_draft = allowed[:, :-1] if inputs.d2t is None else allowed[:, :-1, inputs.d2t]
        of_draft = of_draft | (torch.arange(of_draft.shape[1]) >= inputs.masked_drafts)[:, None]
        draft = draft.masked_fill(~of_draft, -INF)
    target = inputs.target_logits.masked_fill(~allowed, -INF)
    return inputs.replace(target_logits=target, draft_logits=draft, allowed=None, masked_drafts=0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES)
def test_a_masked_token_counts_as_minus_infinity(backend, case, rule):
    inputs = inputs_of(case, rule)
    got, want = inputs.run(backend), masked_by_hand(inputs).run(backend)
    assert identical(got[:4], want[:4])
    if inputs.log_probs:
        torch.testing.assert_close(got.log_probs, want.log_probs, equal_nan=True)
        raw = inputs.target_logits.log_softmax(-1).gather(-1, got.tokens.clamp(min=0)[..., None])[..., 0]
        raw = raw.masked_fill(got.tokens < 0, NAN)
        torch.testing.assert_close(got.raw_log_probs, raw, equal_nan=True)


@pytest.mark.parametrize("rule", ["token", "coupled"])
@pytest.mark.parametrize("reduced", [0, 700])
def test_a_draft_is_drawn_among_the_allowed_tokens(backend, reduced, rule):
    """By the target's ids, where the draft's vocabulary is reduced."""
    inputs = random_step(4, 2, 1100, kind="one_hot", rule=rule, allowed=0.4, temperature=(0.7, 0.0), top_p=0.9)
    ids = torch.randperm(1100, generator=torch.Generator().manual_seed(3))[:reduced].sort().values
    ids = ids if reduced else torch.arange(1100)
    allowed, logits = tokens_of(inputs.allowed[:, 1], 1100)[:, ids], inputs.target_logits[:, 1, ids]
    inputs = inputs.replace(d2t=ids if reduced else None)
    got = inputs.replace(masked_drafts=2).draft(logits, 1, backend)
    want = inputs.draft(logits.masked_fill(~allowed, -INF), 1, backend)
    assert torch.equal(got.tokens, want.tokens) and (got.status == 0).all()
    torch.testing.assert_close(torch.stack(got[1:4]), torch.stack(want[1:4]))
    assert tokens_of(inputs.allowed[:, 1], 1100).gather(1, got.tokens[:, None]).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES)
def test_where_all_are_allowed_nothing_changes(backend, case, rule):
    inputs = inputs_of(case, rule, allowed=None, masked_drafts=0)
    words = torch.full((3, 4, -(-inputs.target_logits.shape[-1] // WORD_BITS)), -1, dtype=torch.int32)
    masked = 0 if inputs.draft_logits is None else 3
    assert identical(inputs.replace(allowed=words, masked_drafts=masked).run(backend), inputs.run(backend))


@pytest.mark.parametrize("rule", RULES)
def test_bits_beyond_the_vocabulary_have_no_effect(backend, rule):
    """As do those of other layouts than a dense one, and of rows that are not read."""
    inputs = inputs_of("full", rule)
    cleared = inputs.allowed.clone()
    cleared[..., -1] &= 1  # of V = 33
    assert not torch.equal(cleared, inputs.allowed)
    spread = torch.stack([cleared, ~cleared], -1)[..., 0]
    few = torch.tensor([3, 0, 1])
    want = inputs.replace(num_drafts=few).run(backend)
    unread = cleared.clone()
    unread[torch.arange(4) > few[:, None]] = 0
    for words in (cleared, spread, unread):
        assert identical(inputs.replace(allowed=words, num_drafts=few).run(backend), want)


def test_a_row_that_allows_nothing(backend):
    """It is as empty as one of -inf; no draft is drawn from it."""
    row, nothing = torch.tensor([[1.0, 0.0, 2.0]]), torch.zeros(1, 1, dtype=torch.int32)
    drawn = drafted(backend, row, allowed=nothing)
    assert drawn.tokens.tolist() == [-1] and drawn.status.tolist() == [Status.DRAFT_EMPTY]
    allowed = bits_of(torch.tensor([[True] * 3, [False] * 3, [True] * 3]))
    for rule in rules_for(backend, 1):
        for temperature in (0.0, 1.0):
            inputs = step([[0.0, 9.0, 0.0], *[[0.0] * 3] * 2], [1, 1], None, 3, temperature, rule=rule)
            inputs.target_logits = inputs.target_logits.clone()
            inputs.target_logits[:, 0, [0, 2]] = -INF  # the first draft is accepted
            for first in (0, 1):
                out = inputs.replace(allowed=allowed.roll(-first, 0).expand(3, -1, -1)).run(backend)
                assert out.status.tolist() == [Status.TARGET_EMPTY] * 3
                assert out.tokens.tolist() == [[1, -1, -1] if first == 0 else [-1] * 3] * 3
                assert out.num_emitted.tolist() == out.num_accepted.tolist() == [1 - first] * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("form", ["one_hot", "full", "stats"])
def test_a_draft_that_may_not_follow_is_rejected(backend, form, temperature):
    """However likely it is to both models, and although it was drawn from an unmasked q."""
    n, target = seeds(backend), [[0.0, 20.0, 1.0], [0.0, 0.0, 0.0]]
    allowed = bits_of(torch.tensor([[True, False, True], [True] * 3])).expand(n, -1, -1)
    lse = torch.tensor(target[0]).logsumexp(0).expand(n, 1)
    more = {"draft_stats": (torch.full((n, 1), -INF), lse)} if form == "stats" else {}
    for rule in rules_for(backend, len(form)):
        if rule == "coupled" and form != "one_hot":
            continue
        draft = None if form == "one_hot" else target[:1]
        out = step(target, [1], draft, n, temperature, rule=rule, allowed=allowed, **more).run(backend)
        assert (out.num_accepted == 0).all() and (out.num_emitted == 1).all() and (out.status == 0).all()
        assert set(out.tokens[:, 0].tolist()) == ({2} if temperature == 0 or n < 10 else {0, 2}) or n < 10


def test_with_coupled_a_text_is_that_of_plain_sampling(backend):
    """Each emitted token is the one that its row alone gives, without drafts, under its mask."""
    inputs = random_step(6, 3, 70, rule="coupled", allowed=0.6, masked_drafts=3, temperature=(0.5, 1.0), top_p=0.95)
    out = inputs.run(backend)
    assert out.num_accepted.sum() > 0
    for j in range(4):
        plain = inputs.replace(
            target_logits=inputs.target_logits[:, j : j + 1], draft_tokens=inputs.draft_tokens[:, :0],
            position=inputs.position + j, allowed=inputs.allowed[:, j : j + 1],
        ).run(backend)  # fmt: skip
        emitted = out.num_emitted > j
        assert torch.equal(out.tokens[emitted, j], plain.tokens[emitted, 0])
