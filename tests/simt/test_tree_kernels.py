"""How the CUDA kernels of trees (csrc/cuda/verify_tree.h, draft_children.h) divide and read rows. That their tokens are
the reference's is tested in tests/kernels/test_trees*.py."""

from __future__ import annotations

import pytest
import torch
from simt import kernels

from specdec_kernels import SamplingTensors
from specdec_kernels.backends import reference, reference_tree
from specdec_kernels.testing import TreeInputs, assert_same_tree_step, random_tree_step
from specdec_kernels.types import TreeStep

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves run")

FORK = (-1, -1, 0, 0, 1, 3, -1)
# Rows stay in the slots of one cluster's blocks, or are read in place by one block and by several; scratch memory. One
# warp takes several blocks of logits, or none.
GRIDS = [
    {"blocks": blocks, "threads": threads, "slots": slots}
    for blocks, threads, slots in ((3, 64, -1), (1, 64, 0), (2, 32, -1), (4, 64, 0), (-1, 64, 0))
]


def run(inputs: TreeInputs, **grid: int) -> TreeStep:
    return TreeStep(*kernels.verify_tree(*inputs.operands(), **grid))


@pytest.mark.parametrize("rule", ["walk", "token", "block"])
@pytest.mark.parametrize("reduced", [0, pytest.param(3000, marks=pytest.mark.nightly)])
def test_every_launch_returns_the_same(rule, reduced):
    """The reference's tokens, bit for bit the same in all launches, of rows that begin and end anywhere."""
    inputs = random_tree_step(
        FORK, 4, 4237, rule=rule, dtype=torch.bfloat16, draft_dtype=torch.float16, similar=False, reduced=reduced,
        temperature=(0.7, 1.3, 1.0, 0.0), top_k=(0, 0, 3000, 0), table=5, drafter="cpu", random_state=3,
    )  # fmt: skip
    want, margin = inputs.reference()
    first = None
    for grid in GRIDS:
        got = run(inputs, **grid)
        assert_same_tree_step(got, want, margin, str(grid))
        first = first or got
        assert all(map(torch.equal, got, first)), grid


def equal_rows(rejected: int, rule: str) -> TreeInputs:
    """One sequence with two levels of three children each, whose rows have p = q up to a constant that rejects: of the
    root's children, the first ``rejected`` have no p."""
    parents = (-1, -1, -1, 0, 0, 0, 1, 1, 1, 2, 2, 2)
    inputs = random_tree_step(parents, 1, 4096, rule=rule, drafter="cpu", random_state=5)
    target = inputs.draft_logits.clone()
    target[0, 0, inputs.node_tokens[0, :rejected]] = -float("inf")
    return inputs.replace(target_logits=target)


@pytest.mark.parametrize("rejected", [0, 1, 2])
def test_only_rows_of_the_path_are_read(rejected):
    """Rule ``token``: p and q of the root, of a child and of its child; both again for a rejection, if they did not
    stay in slots; and the block that a token is drawn from, by each warp."""
    inputs, row = equal_rows(rejected, "token"), 4 * 4096
    drawn = 2 * row // 4
    for slots in (0, -1):
        kernels.take_counts()
        out = run(inputs, blocks=2, threads=64, slots=slots)
        work = kernels.take_counts()
        assert out.num_accepted.tolist() == [2] and out.path[0, 0] == rejected
        rows = 2 + 2 + 1  # the leaf has no children, and so no q
        if slots:
            assert work.copied == rows * row and work.from_device == drawn
        else:
            assert work.copied == 0 and work.from_device == (rows + 2 * rejected) * row + drawn


def test_a_row_is_read_again_when_the_path_returns():
    """Rule ``block``: when a child's subtree is rejected, the slots hold the child's row, and not its parent's."""
    inputs = random_tree_step(FORK, 12, 3100, rule="block", similar=False, drafter="cpu", random_state=1)
    want, margin = inputs.reference()
    kernels.take_counts()
    assert_same_tree_step(run(inputs, blocks=2, threads=64, slots=-1), want, margin)
    assert kernels.take_counts().from_device > 12 * 2 * 4 * 3100


def children(logits: torch.Tensor, width: int, seed: int, **grid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(The tokens of draft_children on fibers, those of the reference.)"""
    zero = torch.zeros(1, dtype=torch.int64)
    arguments = (logits, SamplingTensors(torch.ones(1)), None, None, zero + seed, zero, zero, width, True)
    return kernels.draft_children(*arguments, **grid)[0], reference_tree.draft_children(*arguments)[0]


def test_more_arrivals_than_the_list_holds():
    """Of equal tokens, twice as many as are wanted arrive while the time doubles, and by chance some more. With this
    seed, the first 1024 end just inside a range of scores, at whose end 2048 is exceeded, so that it is divided."""
    vocabulary, seed = 17_000, 883
    u = reference.uniform(reference.philox(torch.tensor([seed]), torch.arange(vocabulary)[None], torch.zeros(1).long(),
                                           torch.zeros(1).long(), reference.DRAFT_TOKEN))  # fmt: skip
    arrival = -torch.log1p(-u)
    assert (arrival < 1 / 16).sum() < 1024 and (arrival < 1 / 8).sum() > 2048
    got, want = children(torch.zeros(1, vocabulary), 1024, seed, blocks=3, threads=64, slots=-1)
    assert torch.equal(got, want)
