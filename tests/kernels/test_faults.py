"""Rows without a distribution (NaN, +inf, all -inf), in every backend and with every rule."""

from __future__ import annotations

import itertools

import pytest
import torch
from support import BACKENDS, FAST_BACKENDS
from support.arrangements import INF, NAN, drafted, identical, step

from specdec_kernels import Status
from specdec_kernels.ops import RULES
from specdec_kernels.testing import random_step

# The values that are written into a row; empty: -inf everywhere.
FAULTS = {"nan": [NAN], "positive_infinity": [INF], "nan_and_infinity": [NAN, INF], "empty": []}
TARGET = {
    "nan": Status.TARGET_NAN,
    "positive_infinity": Status.TARGET_POSITIVE_INFINITY,
    "nan_and_infinity": Status.TARGET_NAN,
    "empty": Status.TARGET_EMPTY,
}
DRAFT = {fault: Status(flag << 3) for fault, flag in TARGET.items()}


def tried(rules: tuple[str, ...]) -> list[tuple]:
    """All combinations of (backend, fault, V, rule), but for Triton's interpreter, which is slow, one rule per
    fault."""
    cases = itertools.product(BACKENDS, FAULTS, (9, 1100), rules)
    number = {fault: i for i, fault in enumerate(FAULTS)}
    return [
        (backend, fault, vocabulary, rule)
        for backend, fault, vocabulary, rule in cases
        if backend != "triton" or torch.cuda.is_available() or rule == rules[number[fault] % len(rules)]
    ]


def spoil(rows: torch.Tensor, fault: str) -> None:
    """Writes a fault into the rows [..., V]."""
    if fault == "empty":
        rows.fill_(-INF)
    else:
        for distance, value in enumerate(FAULTS[fault]):
            rows[..., rows.shape[-1] // 2 - distance] = value


@pytest.mark.parametrize(("backend", "fault", "vocabulary", "rule"), tried(RULES))
def test_target_fault(backend, fault, vocabulary, rule):
    """From a faulty row on, nothing is emitted, if the sequence gets there; else the fault has no effect. Neighbours
    stay the same, bit for bit."""
    inputs = random_step(4, 2, vocabulary, random_state=11, rule=rule)
    # The same model drafts, so all drafts are accepted.
    tokens = torch.stack([inputs.draft(inputs.target_logits[:, i], i, backend).tokens for i in range(2)], 1)
    q = None if rule == "coupled" else inputs.target_logits[:, :2].clone()
    inputs = inputs.replace(draft_tokens=tokens, draft_logits=q, num_drafts=torch.tensor([2, 2, 1, 0]))
    clean = inputs.run(backend)
    assert clean.num_accepted.tolist() == [2, 2, 1, 0]
    for row in range(3):
        spoiled = inputs.replace(target_logits=inputs.target_logits.clone())
        spoil(spoiled.target_logits[1:, row], fault)
        out = spoiled.run(backend)
        assert torch.equal(out.tokens[0], clean.tokens[0]) and out.status[0] == 0
        for b, num_drafts in ((1, 2), (2, 1), (3, 0)):
            consulted = row <= num_drafts
            want = clean.tokens[b].clone()
            want[row if consulted else 3 :] = -1
            assert out.tokens[b].tolist() == want.tolist()
            assert out.num_accepted[b] == (min(row, num_drafts) if consulted else num_drafts)
            assert out.status[b] == (TARGET[fault] if consulted else 0)
            assert out.num_emitted[b] == (want >= 0).sum()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fault", FAULTS)
def test_target_fault_after_a_rejection_is_not_seen(backend, fault, rule):
    inputs = step([[0.0, -INF, 1.0], [1.0, 0.0, 0.0]], [1], None, 3, rule=rule)
    clean = inputs.run(backend)
    inputs = inputs.replace(target_logits=inputs.target_logits.clone())
    spoil(inputs.target_logits[:, 1], fault)
    assert identical(inputs.run(backend), clean)
    assert (clean.num_accepted == 0).all()


@pytest.mark.parametrize("stats", [None, "from_the_row", "stale"])
@pytest.mark.parametrize(("backend", "fault", "vocabulary", "rule"), tried(("token", "block")))
def test_draft_fault(backend, fault, vocabulary, stats, rule):
    """The sequence's drafts end there, and its token is drawn from the target alone. Neighbours stay the same, bit for
    bit.

    For such a row, draft_step returns lse = NaN. If a caller passes statistics of another row instead, it is only
    guaranteed that ids are within the vocabulary and that neighbours stay the same.
    """
    inputs = random_step(3, 2, vocabulary, random_state=12, stats=stats is not None, rule=rule)
    clean = inputs.run(backend)
    spoiled = inputs.replace(draft_logits=inputs.draft_logits.clone())
    spoil(spoiled.draft_logits[1, 0], fault)
    if stats == "from_the_row":
        spoiled.draft_stats[1][1, 0] = drafted(backend, spoiled.draft_logits[1:2, 0]).lse[0]
        assert spoiled.draft_stats[1][1, 0].isnan()
    out = spoiled.run(backend)
    for b in (0, 2):
        assert identical([t[b] for t in out[:4]], [t[b] for t in clean[:4]])
    assert ((out.tokens >= -1) & (out.tokens < vocabulary)).all() and out.tokens[1, 0] >= 0
    if stats == "stale":
        return
    # lse is a single NaN and cannot tell which fault it was.
    assert out.status[1] in (DRAFT[fault], Status.DRAFT_NAN if stats else DRAFT[fault])
    assert out.num_accepted[1] == 0 and (out.tokens[1, 1:] == -1).all()
    alone = inputs.replace(num_drafts=torch.zeros(3, dtype=torch.int64)).run(backend)
    assert out.tokens[1, 0] == alone.tokens[1, 0]


@pytest.mark.parametrize("options", [{}, {"rule": "coupled"}], ids=str)
@pytest.mark.parametrize("vocabulary", [9, 1100])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_step_fault(backend, fault, vocabulary, temperature, options):
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(13))
    clean = drafted(backend, logits, temperature, **options)
    spoil(logits[2], fault)
    out = drafted(backend, logits, temperature, **options)
    others = [0, 1, 3]
    assert identical([t[others] for t in out if t is not None], [t[others] for t in clean if t is not None])
    assert out.tokens[2] == -1 and out.status[2] == DRAFT[fault]
    assert out.log_q[2] == -INF and out.lse[2].isnan() and (clean.status == 0).all()


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_filters_leave_a_faulty_row_as_it_is(backend, fault, filters):
    """Also if the row has many blocks, of which one is faulty."""
    inputs = step([[0.0] * 2100] * 2, [7], None, 2, **filters)
    inputs = inputs.replace(target_logits=inputs.target_logits.clone())
    spoil(inputs.target_logits[1, 0], fault)
    out = inputs.run(backend)
    assert out.status.tolist() == [0, TARGET[fault]] and out.tokens[1].tolist() == [-1, -1]
    drawn = inputs.draft(inputs.target_logits[:, 0], 0, backend)
    assert drawn.status.tolist() == [0, DRAFT[fault]] and drawn.tokens[1] == -1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fast", FAST_BACKENDS)
def test_several_faults_in_one_row(fast, rule):
    """The status is the same in every backend."""
    for values in ([NAN, INF], [NAN, -INF], [INF, -INF], [NAN, INF, -INF], [-INF, -INF]):
        row = [1.0] * (3 - len(values)) + values if values != [-INF, -INF] else [-INF, -INF, -INF]
        inputs = step([row, [0.0] * 3], [0], None, 1, rule=rule)
        assert inputs.run(fast).status.tolist() == inputs.run("reference").status.tolist(), row
        logits = torch.tensor([row])
        assert drafted(fast, logits).status.tolist() == drafted("reference", logits).status.tolist(), row
