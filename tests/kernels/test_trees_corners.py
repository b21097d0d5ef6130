"""Corners of the tree operations (docs/numerics.md), in every backend that has them and with every rule."""

from __future__ import annotations

import sys

import pytest
import torch
from support.arrangements import INF, NAN, identical, on_backend

from specdec_kernels import SamplingParams, Status, draft_children
from specdec_kernels.ops import TREE_RULES
from specdec_kernels.testing import TreeInputs, device_of, random_tree_step

SEEDS = 200
TOP_TEST = 323_239  # with this seed, the number that tests node 0 at position 0 is almost 1 (test_extreme_noise.py)
FORK = (-1, -1, 0, 0, 1, 3, -1)


@pytest.fixture(autouse=True)
def fewer_in_the_interpreter(tree_backend, monkeypatch):
    if device_of(tree_backend).type == "cpu" and tree_backend == "triton":
        monkeypatch.setattr(sys.modules[__name__], "SEEDS", 30)


def tree(target, tokens, parents, draft=None, n=None, **more) -> TreeInputs:
    """A step with target rows [N+1, V], tokens [N] and draft rows [N+1, V] (or one for all), for n or SEEDS seeds."""
    n = SEEDS if n is None else n
    target = torch.tensor(target, dtype=torch.float32).expand(len(tokens) + 1, -1)
    if draft is not None:
        draft = torch.tensor(draft, dtype=torch.float32).expand(len(tokens) + 1, -1).expand(n, -1, -1)
    sampling = {name: more.pop(name) for name in ("temperature", "top_k") if name in more}
    return TreeInputs(
        target.expand(n, -1, -1), torch.tensor(tokens).expand(n, -1), torch.tensor(parents).expand(n, -1), draft,
        SamplingParams(**sampling), torch.arange(n), torch.zeros(n, dtype=torch.int64), **more,
    )  # fmt: skip


@pytest.mark.parametrize("rule", TREE_RULES)
def test_greedy_goes_to_the_largest_logit(tree_backend, rule):
    """The lowest id of a tie, whatever q is, and the first of siblings that hold the same token."""
    target = [[0.0, 3.0, 3.0], [5.0, 5.0, 0.0], [0.0, 0.0, 9.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    draft = None if rule == "walk" else [NAN, 0.0, INF]
    out = tree(target, [2, 1, 0, 1], [-1, -1, 1, -1], draft, 2, temperature=0.0, rule=rule).run(tree_backend)
    assert out.path[0].tolist() == [1, -1, -1, -1, -1] and out.tokens[0].tolist() == [1, 2, -1, -1, -1]
    out = tree(target[:4], [1, 0, 2], [-1, 0, 0], draft, 2, temperature=0.0, rule=rule, depth=2).run(tree_backend)
    assert out.path[0].tolist() == [0, 1, -1] and out.tokens[0].tolist() == [1, 0, 2]
    assert out.status.tolist() == [0, 0]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_equal_rows_are_accepted_with_certainty(tree_backend, rule):
    """p == q bitwise: the first child is accepted, whatever u."""
    row = [0.3, -1.0, 0.7, 0.1]
    out = tree(row, [2, 0, 1], [-1, -1, 0], row, rule=rule).run(tree_backend)
    assert (out.num_accepted == 2).all() and (out.path[:, :2] == torch.tensor([0, 2])).all()


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_residual_without_mass(tree_backend, rule):
    """p and q differ by a constant, and so by the rounding of lse, which makes p smaller than q everywhere for some of
    these. The first child is accepted even then, with the largest u that there is, unless p(x) = 0: then it is as if it
    were not there."""
    row = [0.25, -0.25, 1.0, 0.5]
    draft = [0.25, -0.25, -20.0, 0.5]  # of which p has no token 2
    for constant in range(8, 200, 7):
        target = [x + constant for x in row]
        out = tree(target, [2, 0, 1], [-1, -1, 0], row, 1, rule=rule)
        out = out.replace(seed=torch.tensor([TOP_TEST])).run(tree_backend)
        assert out.path[0, 0] == 0 and (out.num_emitted == out.num_accepted + 1).all() and not out.status.any()
        target[2] = -INF
        out = tree(target, [2, 0], [-1, -1], draft, 20, rule=rule).run(tree_backend)
        assert (out.path[:, 0] == 1).float().mean() > 0.9 and not out.status.any()
        assert (out.num_emitted == out.num_accepted + 1).all() and (out.tokens != 2).all()


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_child_that_p_cannot_be_is_rejected(tree_backend, rule):
    """p(x) = 0 for the first child: the second one is tested with what is left."""
    out = tree([-INF, 1.0, 1.0], [0, 1], [-1, -1], [5.0, 1.0, 0.0], rule=rule).run(tree_backend)
    assert {1, -1} >= set(out.path[:, 0].tolist()) and (out.status == 0).all()
    assert set(out.tokens[:, 0].tolist()) <= {1, 2} and (out.num_accepted == 1).any()


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("tokens", [[1, 1], [1, 0, 0, 1]])
def test_a_sibling_twice_or_unknown_to_q(tree_backend, rule, tokens):
    """q without what was drawn holds neither a repeated token nor one that q never yields: rejected, and told, if its
    turn comes."""
    p, q = [0.0, 0.1, 0.2, 1.5], [-INF, 3.0, 0.0, 0.0]
    out = tree(p, tokens, [-1] * len(tokens), q, rule=rule).run(tree_backend)
    accepted = out.num_accepted == 1
    assert accepted.any() and (~accepted).any()
    assert (out.path[accepted, 0] == 0).all() and (out.status[accepted] == 0).all()
    assert (out.status[~accepted] == Status.DRAFT_ZERO_PROBABILITY).all()
    assert set(out.tokens[~accepted, 0].tolist()) <= {0, 2, 3}


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("token", [-1, -2, 3, 2**40])
def test_nodes_without_a_token(tree_backend, rule, token):
    """Neither they nor what is below them are candidates; their siblings are. Ids out of range are told."""
    inputs = tree(
        [0.0, 1.0, 2.0], [token, 2, 2, 2], [-1, 0, -1, 2], None if rule == "walk" else [0.0, 1.0, 2.1], rule=rule
    )
    out = inputs.run(tree_backend)
    assert set(out.path[:, 0].tolist()) == {-1, 2} and (out.num_accepted == 2).any()
    assert (out.status == (0 if token == -1 else Status.DRAFT_OUT_OF_RANGE)).all()
    shorter = inputs.replace(node_tokens=torch.tensor([-1, -1, 2, 2]).expand(SEEDS, -1)).run(tree_backend)
    assert identical(out[:4], shorter[:4]) and not shorter.status.any()


FAULTS = {"nan": [NAN, 0.0, INF], "infinity": [0.0, INF, -INF], "empty": [-INF] * 3}
FLAGS = {"nan": 1, "infinity": 2, "empty": 4}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rule", TREE_RULES)
def test_faults_of_the_target(tree_backend, rule, fault):
    """A row without a distribution ends the path there, if the path gets there, and emits nothing."""
    row = [0.2, 0.1, 0.0]
    q = None if rule == "walk" else [1.5, 0.0, 0.0]
    spoiled = tree([row, FAULTS[fault], row, row], [0, 1, 0], [-1, -1, 0], q, rule=rule).run(tree_backend)
    there = spoiled.path[:, 0] == 0
    assert there.any() and not there.all()
    assert (spoiled.status[~there] == 0).all()
    assert torch.equal(spoiled.num_emitted[~there], spoiled.num_accepted[~there] + 1)
    assert (spoiled.status[there] == FLAGS[fault]).all() and (spoiled.num_accepted[there] == 1).all()
    assert (spoiled.num_emitted[there] == 1).all() and (spoiled.tokens[there, 1:] == -1).all()
    root = tree([FAULTS[fault], row, row, row], [0, 1, 0], [-1, -1, 0], q, rule=rule).run(tree_backend)
    assert (root.tokens == -1).all() and (root.status == FLAGS[fault]).all() and (root.num_emitted == 0).all()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_faults_of_the_draft(tree_backend, rule, fault):
    """The row's children are no candidates; the token is drawn from the target alone, as without them."""
    row = [0.2, 0.1, 0.0]
    spoiled = tree(row, [0, 1, 0], [-1, -1, 0], [row, FAULTS[fault], row, row], rule=rule).run(tree_backend)
    shorter = tree(row, [0, 1, -1], [-1, -1, 0], row, rule=rule).run(tree_backend)
    assert identical(spoiled[:4], shorter[:4])
    assert (spoiled.status == 8 * FLAGS[fault]).all() and (spoiled.num_accepted == 1).all()
    unread = tree(row, [0, 1, 0], [-1, -1, 0], [row, row, FAULTS[fault], FAULTS[fault]], rule=rule).run(tree_backend)
    assert not unread.status.any()


@pytest.mark.parametrize("rule", TREE_RULES)
def test_trees_without_candidates(tree_backend, rule):
    """B = 0, N = 0, num_nodes = 0, depth = 0 and parents that come too late draw one token from p, the same one."""
    inputs = random_tree_step(FORK, 6, 9, rule=rule, random_state=6)
    alone = inputs.replace(num_nodes=torch.zeros(6, dtype=torch.int64)).run(tree_backend)
    assert (alone.num_emitted == 1).all() and (alone.num_accepted == 0).all()
    flat = inputs.replace(depth=0).run(tree_backend)
    assert torch.equal(flat.tokens, alone.tokens[:, :1]) and flat.path.tolist() == [[-1]] * 6
    root = inputs.replace(
        target_logits=inputs.target_logits[:, :1], node_tokens=inputs.node_tokens[:, :0], parents=inputs.parents[:, :0],
        draft_logits=None if rule == "walk" else inputs.draft_logits[:, :1],
    )  # fmt: skip
    assert torch.equal(root.run(tree_backend).tokens, alone.tokens[:, :1])
    assert inputs.map(lambda t: t[:0]).run(tree_backend).tokens.shape == (0, 8)


# ---- Children --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [3, 1024, 2500])
def test_likely_children_are_in_order(tree_backend, vocabulary):
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(1)).mul(4).round() / 4  # with ties
    logits[1, 1:] = -INF
    params = SamplingParams(torch.tensor([0.0, 1.0, 0.5, 2.0]), top_k=torch.tensor([1, 0, 2, 0]))
    common = {"seed": 0, "position": 0, "offset": 0, "backend": tree_backend}
    out = on_backend(draft_children, logits, 7, params, **common, sampled=False)
    for b, count in enumerate((vocabulary, 1, None, vocabulary)):
        order = sorted(range(vocabulary), key=lambda v, b=b: (-logits[b, v].item(), v))
        if count is None:
            count = int((logits[b] >= logits[b, order[1]]).sum())
        want = order[: min(7, count)]
        assert out.tokens[b].tolist() == want + [-1] * (7 - len(want))
        assert (out.log_q[b, len(want) :] == -INF).all() and out.log_q[b, : len(want)].isfinite().all()
    log_q = logits[0].double().log_softmax(-1)
    assert torch.allclose(out.log_q[0].double(), log_q[out.tokens[0].clamp(min=0)].masked_fill(out.tokens[0] < 0, -INF))


def test_sampled_children(tree_backend):
    """All different, as many as q has, and one at temperature 0."""
    logits = torch.tensor([[1.0, 0.0, -INF, 2.0, 0.5]]).expand(SEEDS, -1)
    common = {"seed": torch.arange(SEEDS), "position": 3, "offset": 2, "backend": tree_backend}
    out = on_backend(draft_children, logits, 6, SamplingParams(), **common)
    assert (out.tokens.sort(-1).values == torch.tensor([-1, -1, 0, 1, 3, 4])).all() and (out.tokens[:, 4:] == -1).all()
    assert out.tokens[:, 0].unique().numel() == 4
    assert torch.allclose(out.log_q[:, :4].exp().sum(1), torch.ones(SEEDS)) and (out.log_q[:, 4:] == -INF).all()
    greedy = on_backend(draft_children, logits, 3, SamplingParams(0.0), **common)
    assert greedy.tokens.unique(dim=0).tolist() == [[3, -1, -1]]
    common["seed"], logits = 0, torch.tensor([[NAN, 0.0], [INF, 0.0], [-INF, -INF]])
    bad = on_backend(draft_children, logits, 2, SamplingParams(), **common)
    assert bad.status.tolist() == [8, 16, 32] and (bad.tokens == -1).all() and bad.lse.isnan().all()
