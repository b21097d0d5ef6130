"""Rows that a launch of its own measures (csrc/cuda/statistics_kernel.h): the same outputs as in one launch, bit for
bit."""

from __future__ import annotations

import pytest
import torch
from simt import kernels

from specdec_kernels.ops import RULES
from specdec_kernels.testing import StepInputs, random_step

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves run")

FORMS = {
    "full": {},
    "stats": {"stats": True},
    "reduced": {"reduced": 900, "stats": True},
    "one_hot": {"kind": "one_hot"},
}
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# (blocks in a cluster, threads, slots of a warp): pairs of a residual in slots, more warps than blocks, none.
ARRANGEMENTS = ((2, 64, 4), (3, 32, -1), (1, 96, 0))


def inputs_of(number: int, rule: str, form: str) -> StepInputs:
    """Greedy and sampled sequences with drafts of different lengths; rows of one block, of several, and of some that
    begin anywhere."""
    vocabulary = (1000, 2050, 4237)[number]
    inputs = random_step(
        4, 3, vocabulary, dtype=DTYPES[number], draft_dtype=DTYPES[number - 1], rule=rule, drafter="cpu",
        temperature=(0.7, 0.0, 1.3, 1.0), top_k=(0, 0, 30, 0) if number == 1 else None, random_state=number,
        **FORMS[form],
    )  # fmt: skip
    return inputs.replace(num_drafts=torch.tensor([3, 2, 1, 0])) if number else inputs


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_steps(rule, form):
    for number, (blocks, threads, slots) in enumerate(ARRANGEMENTS):
        operands = inputs_of(number, rule, form).operands()
        want = kernels.speculative_step(*operands, blocks=2, threads=64, slots=0)
        got = kernels.speculative_step(*operands, blocks=blocks, threads=threads, slots=slots, measured=True)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("rule", ["token", "coupled"])
def test_drafts(rule):
    for number, (blocks, threads, _) in enumerate(ARRANGEMENTS):
        inputs = inputs_of(number, rule, "full")
        rest = (inputs.seed, inputs.position, 0, RULES.index(rule))
        operands = (inputs.target_logits[:, 0], inputs.sampling(), None, None, None, *rest)
        want = kernels.draft_step(*operands, blocks=2, threads=64)
        got = kernels.draft_step(*operands, blocks=blocks, threads=threads, measured=True)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


def test_a_small_kernel_measures():
    """It loads every block of logits, and at most the two rows of a residual are left for the second launch."""
    inputs = random_step(1, 3, 4096, dtype=torch.bfloat16, stats=True, drafter="cpu")
    counted = []
    for measured in (False, True):
        kernels.take_counts()
        kernels.speculative_step(*inputs.operands(), blocks=2, threads=64, slots=-1, measured=measured)
        counted.append(kernels.take_counts().copies)
    assert counted[0] >= 4 * 4 and counted[1] <= 2 * 4
