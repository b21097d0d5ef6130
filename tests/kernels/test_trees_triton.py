"""Trees in the Triton backend, in few cases that its interpreter can run every day. The other files about trees cover
it as well, nightly or on a GPU."""

from __future__ import annotations

import pytest
import torch
from support.arrangements import INF, LAYOUTS, NAN

from specdec_kernels import SamplingParams, draft_children
from specdec_kernels.ops import TREE_RULES
from specdec_kernels.testing import TreeInputs, assert_same_children, assert_same_tree_step, random_tree_step

FORK = (-1, -1, 0, 0, 1, 3, -1)
TABLE = {"table": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}


def compare(inputs, row: int = 0, path: tuple[int, ...] = (), width: int = 3):
    """Compares a step, and the children of a row, with the reference. Returns the step."""
    got = inputs.run("triton")
    assert_same_tree_step(got, *inputs.reference())
    logits = inputs.target_logits if inputs.draft_logits is None else inputs.draft_logits
    arguments = (logits[:, row], row, path, width)
    assert_same_children(inputs.draft(*arguments, "triton"), *inputs.reference_draft(*arguments))
    return got


@pytest.mark.parametrize("rule", TREE_RULES)
def test_rules(rule):
    """Greedy and sampling sequences whose trees differ; q of target tokens, and of a reduced vocabulary."""
    trees = [FORK, (-1, 0, 1, 2, 3, 4, 5), (-1, -1, -1, 0, 1, 2, 0)]
    inputs = random_tree_step(trees, 4, 9, rule=rule, temperature=(0.0, 1.0, 0.7, 1.5), drafter="cpu", random_state=2)
    inputs = inputs.replace(num_nodes=torch.tensor([7, 7, 7, 4])).map(LAYOUTS["every_second"])
    out = compare(inputs, row=3, path=(0, 2))
    assert out.num_accepted.max() >= 2
    compare(inputs.replace(num_nodes=torch.tensor([7, 3, 7, 1])))
    inputs = random_tree_step(FORK, 3, 9, rule=rule, reduced=6, similar=False, drafter="cpu", random_state=3)
    compare(inputs.replace(depth=2), width=7)


@pytest.mark.parametrize("rule", ["walk", pytest.param("token", marks=pytest.mark.nightly), "block"])
def test_filters_and_penalties(rule):
    """In the row of a node, the node and its ancestors count as generated, and only those."""
    options = {"top_k": (0, 4), "top_p": (0.95, 1.0), "random_state": 5, "drafter": "cpu"}
    compare(random_tree_step(FORK, 2, 8, rule=rule, **options, **TABLE), row=4, path=(0, 3))


@pytest.mark.parametrize("rule", TREE_RULES)
def test_several_blocks(rule):
    """Five blocks are more than one pass reads at once; the children of a flat row are all over them."""
    inputs = random_tree_step((-1, -1, -1, 1), 2, 4500, rule=rule, temperature=1.5, drafter="cpu", random_state=1)
    inputs.target_logits[..., 4096:] += 3.0
    compare(inputs, width=6)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_many_are_rejected(rule):
    """A residual of several rejections, which all blocks of 1024 have a part in."""
    inputs = random_tree_step((-1, -1, -1, 0, 1), 3, 2100, rule=rule, similar=False, drafter="cpu", temperature=2.0)
    compare(inputs)
    options = {"similar": False, "drafter": "cpu", "temperature": 1.5, "random_state": 1}
    inputs = random_tree_step((-1,) * 4, 10, 8, rule=rule, **options).rows(torch.arange(3))
    out = compare(inputs)
    assert (out.path[:, 0] == -1).any()


def test_the_residual_of_an_earlier_rejection():
    """The second child holds the token of the first one, and p and q are equal without it: it is as if it were not
    there, and the token is drawn from what the first one left of p."""
    constant = torch.linspace(0, 5, 8)[:, None]
    target = torch.tensor([[-INF, 1.0, 1.0]]) + constant
    inputs = TreeInputs(
        target[:, None].expand(8, 3, 3), torch.zeros(8, 2, dtype=torch.int64), torch.full((8, 2), -1),
        torch.ones(8, 3, 3), SamplingParams(), torch.arange(8), torch.zeros(8, dtype=torch.int64), rule="token",
    )  # fmt: skip
    out = compare(inputs)
    assert set(out.tokens[:, 0].tolist()) == {1, 2}


@pytest.mark.parametrize("rule", ["walk", "block"])
def test_parents_that_come_too_late(rule):
    """No path goes through them, and none is endless: they have no effect. (On a CPU they are refused.)"""
    from specdec_kernels.backends.triton import verify_tree

    inputs = random_tree_step((-1, 0, -1), 2, 6, rule=rule, drafter="cpu", random_state=1, **TABLE)
    wrong = inputs.replace(parents=torch.tensor([-1, 2, -1]).expand(2, -1))
    without = inputs.replace(node_tokens=inputs.node_tokens.clone())
    without.node_tokens[:, 1] = -1
    for got, want in zip(*(verify_tree.verify_tree(*i.operands()) for i in (wrong, without)), strict=True):
        assert torch.equal(got, want)


def test_rows_of_q_without_children_have_no_effect():
    inputs = random_tree_step((-1, -1, 0), 3, 6, rule="block", drafter="cpu", top_k=4)
    want = inputs.run("triton")
    inputs.draft_logits[:, 2:] = NAN
    assert all(torch.equal(a, b) for a, b in zip(inputs.run("triton"), want, strict=True))


def test_as_many_children_as_allowed():
    """They are all different, in the order of their logits, and the lowest ids of a tie come first."""
    logits = (torch.arange(1300.0) % 7).expand(1, -1)
    order = sorted(range(1300), key=lambda v: (-(v % 7), v))
    options = {"seed": 0, "position": 0, "offset": 0, "backend": "triton"}
    out = draft_children(logits, 200, SamplingParams(), **options, sampled=False)
    assert out.tokens.tolist() == [order[:200]]
