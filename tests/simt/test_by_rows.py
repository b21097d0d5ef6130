"""Steps that are decided row by row (csrc/cuda/by_rows.h): the same outputs as with all rows measured first, bit for
bit, from fewer copies."""

from __future__ import annotations

import pytest
import torch
from simt import kernels

from specdec_kernels.testing import StepInputs, random_step

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves run")

FORMS = {
    "full": {},
    "stats": {"stats": True},
    "reduced": {"reduced": 3000, "stats": True},
    "one_hot": {"kind": "one_hot"},
}
PENALTIES = {"table": 9, "repetition_penalty": (1.0, 1.3), "frequency_penalty": (0.2, -0.1, 0.0)}
# (blocks, threads, slots ahead): each row alone; a row behind the one that is measured, but not a pair of rows, since
# one warp lacks a slot for two; warps with several blocks of a row; with none.
ARRANGEMENTS = [(2, 64, 1), (2, 64, 3), (2, 32, 3), (1, 32, 7), (3, 64, 3)]


def run(inputs: StepInputs, blocks: int, threads: int, ahead: int) -> tuple[tuple[torch.Tensor, ...], int]:
    """The outputs, and the number of copies."""
    kernels.take_counts()
    out = kernels.speculative_step(*inputs.operands(), blocks=blocks, threads=threads, slots=0, ahead=ahead)
    return out, kernels.take_counts().copies


def assert_same(inputs: StepInputs, arrangement: tuple[int, int, int]) -> int:
    """Compares with all rows measured first, and returns the number of copies."""
    want, none = run(inputs, 2, 64, 0)
    got, copies = run(inputs, *arrangement)
    assert none == 0 < copies
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.double().nan_to_num(7.0), b.double().nan_to_num(7.0))
    return copies


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_outputs_are_those_of_all_rows_measured_first(rule, form):
    """Greedy and sampled sequences, ragged drafts, dtypes, penalties, log-probabilities, rows that begin anywhere."""
    for i, arrangement in enumerate(ARRANGEMENTS):
        dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.bfloat16, torch.bfloat16]
        inputs = random_step(
            5, 4, 4237 + i % 2 * 3, dtype=dtypes[i], draft_dtype=dtypes[i - 1], rule=rule, temperature=(0.7, 0.0, 1.3),
            log_probs=i % 2 == 0, drafter="cpu", random_state=i, **FORMS[form], **(PENALTIES if i > 1 else {}),
        )  # fmt: skip
        if i == 1:
            inputs = inputs.replace(num_drafts=torch.arange(5))
        assert_same(inputs, arrangement)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("stats", [False, True])
def test_rows_of_one_dtype_that_begin_anywhere(rule, stats):
    """Only the last token of a block has a residual."""
    inputs = random_step(6, 4, 4093, stats=stats, rule=rule, drafter="cpu", dtype=torch.bfloat16)
    target = inputs.target_logits.clone()
    target[:, :4] = inputs.draft_logits
    target[:, :4, 2047] = 30.0
    assert_same(inputs.replace(target_logits=target), (2, 64, 3))


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_rows_after_a_residual_without_mass(rule, arrangement):
    """Every second q is too small everywhere, as an lse may make it: its draft is accepted when it is rejected, and the
    rows after it count."""
    inputs = random_step(6, 6, 4096, stats=True, rule=rule, drafter="cpu", dtype=torch.bfloat16)
    cutoff, lse = (statistic.clone() for statistic in inputs.draft_stats)
    target = inputs.target_logits.clone()
    target[:, 0:6:2] = inputs.draft_logits[:, ::2]
    target[4:, 1, :3072] = -float("inf")  # a residual of one block, unlike that of row 0
    lse[:, ::2] -= 1.5
    inputs = inputs.replace(target_logits=target, draft_stats=(cutoff, lse))
    want, _ = run(inputs, 2, 64, 0)
    assert want[1].max() > (2 if rule == "token" else 0)  # accepted
    assert_same(inputs, arrangement)


def rejected_at(row: int, rule: str = "token", **more: bool) -> StepInputs:
    """A sequence that accepts its drafts up to a row, over 4 blocks of logits."""
    inputs = random_step(1, 6, 4096, rule=rule, drafter="cpu", **more)
    target = inputs.target_logits.clone()
    target[:, :6] = inputs.draft_logits
    if row < 6:
        target[0, row, inputs.draft_tokens[0, row]] = -float("inf")
    return inputs.replace(target_logits=target)


@pytest.mark.parametrize(
    ("row", "ahead", "rows"),
    [
        (0, 1, 2),  # with two slots a warp, the next row is near; the draft's is read in place
        (2, 1, 4),
        (0, 2, 3 + 1),  # with three, row 1 is measured before row 0 is decided, row 2 is near, and the draft's follows
        (2, 2, 5 + 1),
        (5, 2, 7 + 1),
        (6, 2, 7),
    ],
)
def test_rule_token_stops_at_the_rejection(row, ahead, rows):
    assert assert_same(rejected_at(row, stats=True), (2, 64, ahead)) == 4 * rows


def test_rule_block_reads_each_row_once():
    for stats in (False, True):
        assert assert_same(rejected_at(6, "block", stats=stats), (2, 64, 1)) == 4 * 13
