"""The tree operations: on a chain they are the operations on chains, corners of every row, random numbers, and parity
of backends."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from support import TREE_BACKENDS
from support.arrangements import INF, LAYOUTS, NAN, identical
from support.exact import Rows

from specdec_kernels import SamplingParams, Status, build_info, draft_children, draft_step, verify_tree
from specdec_kernels.backends import reference
from specdec_kernels.ops import TREE_RULES
from specdec_kernels.testing import (
    TreeInputs,
    assert_same_children,
    assert_same_tree_step,
    path_of,
    random_step,
    random_tree_step,
)

MIXED = (0.0, 0.5, 1.0, 1.7)
FILTERS = {"top_k": (0, 20, 1, 0, 5), "top_p": (1.0, 0.9, 0.3), "min_p": (0.0, 0.02)}
PENALTIES = {"repetition_penalty": (1.0, 1.3, 0.8), "presence_penalty": (0.0, 0.5), "frequency_penalty": (0.2, -0.1, 0)}
SAMPLING = {"plain": {}, "filters": FILTERS, "all": {"table": 9, **FILTERS, **PENALTIES}}
FORK = (-1, -1, 0, 0, 1, 3, -1)
TREES = {
    "fork": FORK,
    "wide": (-1,) * 7,
    "several": [FORK, (-1, 0, 1, 2, 3, 4, 5), (-1, -1, -1, 0, 1, 2, 0)],  # which take turns over the batch
    "none": (),
}


@pytest.fixture(params=TREE_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


# ---- Chains ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(("rule", "of_chains"), [("walk", "coupled"), ("token", "token"), ("block", "block")])
def test_a_chain_is_verified_as_by_speculative_step(backend, rule, of_chains, sampling):
    """The same tokens, counts and status with the same random numbers, and also if drafts are strange."""
    for random_state, vocabulary in enumerate((3, 40, 1100)):
        step = random_step(
            40, 4, vocabulary, rule=of_chains, temperature=MIXED, random_state=random_state, **SAMPLING[sampling]
        )
        step = step.replace(num_drafts=torch.arange(40) % 5)
        step.draft_tokens[::7, 2] = torch.tensor([-1, -2, vocabulary, 2**40, -1, -2])
        row = torch.full((40, 1, vocabulary), NAN)
        q = None if step.draft_logits is None else torch.cat([step.draft_logits, row], 1)
        tree = TreeInputs(
            step.target_logits, step.draft_tokens, (torch.arange(4) - 1).expand(40, -1), q, step.params, step.seed,
            step.position, step.num_drafts, table=step.table, rule=rule,
        )  # fmt: skip
        want, got = step.run(backend), tree.run(backend)
        for name in ("tokens", "num_accepted", "num_emitted", "status"):
            assert torch.equal(getattr(got, name), getattr(want, name)), (vocabulary, name)
        nodes = torch.arange(5).expand(40, -1)
        assert torch.equal(got.path, torch.where(nodes < want.num_accepted[:, None], nodes, -1))


def test_walk_emits_the_text_of_plain_sampling(backend):
    """Whatever the tree, the tokens are those that ``coupled`` draws at the same positions."""
    inputs = random_tree_step(TREES["several"], 60, 12, temperature=(0.7, 1.0), random_state=4)
    out = inputs.run(backend)
    assert out.num_accepted.max() >= 2
    for b in range(60):
        for i in range(int(out.num_emitted[b])):
            row = 0 if i == 0 else int(out.path[b, i - 1]) + 1
            params = SamplingParams(inputs.params.temperature[b].item())
            common = {"seed": inputs.seed[b : b + 1], "offset": 0, "rule": "coupled", "backend": backend}
            plain = draft_step(
                inputs.target_logits[b, row][None], params, position=inputs.position[b : b + 1] + i, **common
            )
            assert plain.tokens[0] == out.tokens[b, i]


# ---- Corners ---------------------------------------------------------------------------------------------------------


def tree(target, tokens, parents, draft=None, n=200, **more) -> TreeInputs:
    """A step with target rows [N+1, V], tokens [N] and draft rows [N+1, V] (or one for all rows), for n seeds."""
    target = torch.tensor(target, dtype=torch.float32).expand(len(tokens) + 1, -1)
    if draft is not None:
        draft = torch.tensor(draft, dtype=torch.float32).expand(len(tokens) + 1, -1).expand(n, -1, -1)
    sampling = {name: more.pop(name) for name in ("temperature", "top_k") if name in more}
    return TreeInputs(
        target.expand(n, -1, -1), torch.tensor(tokens).expand(n, -1), torch.tensor(parents).expand(n, -1), draft,
        SamplingParams(**sampling), torch.arange(n), torch.zeros(n, dtype=torch.int64), **more,
    )  # fmt: skip


@pytest.mark.parametrize("rule", TREE_RULES)
def test_greedy_goes_to_the_largest_logit(backend, rule):
    """The lowest id of a tie, whatever q is, and the first of siblings that hold the same token."""
    target = [[0.0, 3.0, 3.0], [5.0, 5.0, 0.0], [0.0, 0.0, 9.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    draft = None if rule == "walk" else [NAN, 0.0, INF]
    out = tree(target, [2, 1, 0, 1], [-1, -1, 1, -1], draft, 2, temperature=0.0, rule=rule).run(backend)
    assert out.path[0].tolist() == [1, -1, -1, -1, -1] and out.tokens[0].tolist() == [1, 2, -1, -1, -1]
    out = tree(target[:4], [1, 0, 2], [-1, 0, 0], draft, 2, temperature=0.0, rule=rule, depth=2).run(backend)
    assert out.path[0].tolist() == [0, 1, -1] and out.tokens[0].tolist() == [1, 0, 2]
    assert out.status.tolist() == [0, 0]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_equal_rows_are_accepted_with_certainty(backend, rule):
    """p == q bitwise: the first child is accepted, whatever u."""
    row = [0.3, -1.0, 0.7, 0.1]
    out = tree(row, [2, 0, 1], [-1, -1, 0], row, rule=rule).run(backend)
    assert (out.num_accepted == 2).all() and (out.path[:, :2] == torch.tensor([0, 2])).all()


@pytest.mark.parametrize("rule", ["token", "block"])
def test_equal_up_to_a_constant(backend, rule):
    """p and q differ only by rounding: the residual may have no mass, and a path is accepted nevertheless."""
    generator = torch.Generator().manual_seed(5)
    row = torch.randn(50, generator=generator)
    for shift in torch.linspace(1, 40, 30).tolist():
        inputs = tree((row + shift).tolist(), [2, 0, 1], [-1, -1, 0], row.tolist(), 20, rule=rule)
        out = inputs.run(backend)
        assert (out.num_emitted == out.num_accepted + 1).all() and (out.status == 0).all()
        assert (out.num_accepted == 2).float().mean() > 0.99


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_child_that_p_cannot_be_is_rejected(backend, rule):
    """p(x) = 0 for the first child: the second one is tested with what is left."""
    out = tree([-INF, 1.0, 1.0], [0, 1], [-1, -1], [5.0, 1.0, 0.0], rule=rule).run(backend)
    assert {1, -1} >= set(out.path[:, 0].tolist()) and (out.status == 0).all()
    assert set(out.tokens[:, 0].tolist()) <= {1, 2} and (out.num_accepted == 1).any()


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("tokens", [[1, 1], [1, 0, 0, 1]])
def test_a_sibling_twice_or_unknown_to_q(backend, rule, tokens):
    """q without what was drawn holds neither a repeated token nor one that q never yields: rejected, and told, if its
    turn comes."""
    p, q = [0.0, 0.1, 0.2, 1.5], [-INF, 3.0, 0.0, 0.0]
    out = tree(p, tokens, [-1] * len(tokens), q, rule=rule).run(backend)
    accepted = out.num_accepted == 1
    assert accepted.any() and (~accepted).any()
    assert (out.path[accepted, 0] == 0).all() and (out.status[accepted] == 0).all()
    assert (out.status[~accepted] == Status.DRAFT_ZERO_PROBABILITY).all()
    assert set(out.tokens[~accepted, 0].tolist()) <= {0, 2, 3}


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("token", [-1, -2, 3, 2**40])
def test_nodes_without_a_token(backend, rule, token):
    """Neither they nor what is below them are candidates; their siblings are. Ids out of range are told."""
    inputs = tree(
        [0.0, 1.0, 2.0], [token, 2, 2, 2], [-1, 0, -1, 2], None if rule == "walk" else [0.0, 1.0, 2.1], rule=rule
    )
    out = inputs.run(backend)
    assert set(out.path[:, 0].tolist()) == {-1, 2} and (out.num_accepted == 2).any()
    assert (out.status == (0 if token == -1 else Status.DRAFT_OUT_OF_RANGE)).all()
    shorter = inputs.replace(node_tokens=torch.tensor([-1, -1, 2, 2]).expand(200, -1)).run(backend)
    assert identical(out[:4], shorter[:4]) and not shorter.status.any()


FAULTS = {"nan": [NAN, 0.0, INF], "infinity": [0.0, INF, -INF], "empty": [-INF] * 3}
FLAGS = {"nan": 1, "infinity": 2, "empty": 4}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rule", TREE_RULES)
def test_faults_of_the_target(backend, rule, fault):
    """A row without a distribution ends the path there, if the path gets there, and emits nothing."""
    row = [0.2, 0.1, 0.0]
    q = None if rule == "walk" else row
    clean = tree(row, [0, 1, 0], [-1, -1, 0], q, rule=rule).run(backend)
    spoiled = tree([row, FAULTS[fault], row, row], [0, 1, 0], [-1, -1, 0], q, rule=rule).run(backend)
    there = clean.path[:, 0] == 0
    assert there.any() and (rule != "walk" or not there.all())
    assert identical([t[~there] for t in spoiled], [t[~there] for t in clean])
    assert (spoiled.status[there] == FLAGS[fault]).all() and (spoiled.num_accepted[there] == 1).all()
    assert (spoiled.num_emitted[there] == 1).all() and (spoiled.tokens[there, 1:] == -1).all()
    root = tree([FAULTS[fault], row, row, row], [0, 1, 0], [-1, -1, 0], q, rule=rule).run(backend)
    assert (root.tokens == -1).all() and (root.status == FLAGS[fault]).all() and (root.num_emitted == 0).all()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_faults_of_the_draft(backend, rule, fault):
    """The row's children are no candidates; the token is drawn from the target alone, as without them."""
    row = [0.2, 0.1, 0.0]
    spoiled = tree(row, [0, 1, 0], [-1, -1, 0], [row, FAULTS[fault], row, row], rule=rule).run(backend)
    shorter = tree(row, [0, 1, -1], [-1, -1, 0], row, rule=rule).run(backend)
    assert identical(spoiled[:4], shorter[:4])
    assert (spoiled.status == 8 * FLAGS[fault]).all() and (spoiled.num_accepted == 1).all()
    unread = tree(row, [0, 1, 0], [-1, -1, 0], [row, row, FAULTS[fault], FAULTS[fault]], rule=rule).run(backend)
    assert not unread.status.any()


@pytest.mark.parametrize("rule", TREE_RULES)
def test_trees_without_candidates(backend, rule):
    """B = 0, N = 0, num_nodes = 0, depth = 0 and parents that come too late draw one token from p, the same one."""
    inputs = random_tree_step(FORK, 6, 9, rule=rule, random_state=6)
    alone = inputs.replace(num_nodes=torch.zeros(6, dtype=torch.int64)).run(backend)
    assert (alone.num_emitted == 1).all() and (alone.num_accepted == 0).all()
    flat = inputs.replace(depth=0).run(backend)
    assert torch.equal(flat.tokens, alone.tokens[:, :1]) and flat.path.tolist() == [[-1]] * 6
    root = inputs.replace(
        target_logits=inputs.target_logits[:, :1], node_tokens=inputs.node_tokens[:, :0], parents=inputs.parents[:, :0],
        draft_logits=None if rule == "walk" else inputs.draft_logits[:, :1],
    )  # fmt: skip
    assert torch.equal(root.run(backend).tokens, alone.tokens[:, :1])
    assert inputs.map(lambda t: t[:0]).run(backend).tokens.shape == (0, 8)


# ---- Children --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [3, 1024, 2500])
def test_likely_children_are_in_order(backend, vocabulary):
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(1)).mul(4).round() / 4  # with ties
    logits[1, 1:] = -INF
    params = SamplingParams(torch.tensor([0.0, 1.0, 0.5, 2.0]), top_k=torch.tensor([1, 0, 2, 0]))
    common = {"seed": 0, "position": 0, "offset": 0, "backend": backend}
    out = draft_children(logits, 7, params, **common, sampled=False)
    for b, count in enumerate((vocabulary, 1, None, vocabulary)):
        order = sorted(range(vocabulary), key=lambda v, b=b: (-logits[b, v].item(), v))
        if count is None:
            count = int((logits[b] >= logits[b, order[1]]).sum())
        want = order[: min(7, count)]
        assert out.tokens[b].tolist() == want + [-1] * (7 - len(want))
        assert (out.log_q[b, len(want) :] == -INF).all() and out.log_q[b, : len(want)].isfinite().all()
    log_q = logits[0].double().log_softmax(-1)
    assert torch.allclose(out.log_q[0].double(), log_q[out.tokens[0].clamp(min=0)].masked_fill(out.tokens[0] < 0, -INF))


def test_sampled_children(backend):
    """All different, as many as q has, and one at temperature 0."""
    logits = torch.tensor([[1.0, 0.0, -INF, 2.0, 0.5]]).expand(300, -1)
    common = {"seed": torch.arange(300), "position": 3, "offset": 2, "backend": backend}
    out = draft_children(logits, 6, SamplingParams(), **common)
    assert (out.tokens.sort(-1).values == torch.tensor([-1, -1, 0, 1, 3, 4])).all() and (out.tokens[:, 4:] == -1).all()
    assert out.tokens[:, 0].unique().numel() == 4
    assert torch.allclose(out.log_q[:, :4].exp().sum(1), torch.ones(300)) and (out.log_q[:, 4:] == -INF).all()
    assert draft_children(logits, 3, SamplingParams(0.0), **common).tokens.unique(dim=0).tolist() == [[3, -1, -1]]
    bad = draft_children(torch.tensor([[NAN, 0.0], [INF, 0.0], [-INF, -INF]]), 2, SamplingParams(), seed=0, position=0,
                         offset=0, backend=backend)  # fmt: skip
    assert bad.status.tolist() == [8, 16, 32] and (bad.tokens == -1).all() and bad.lse.isnan().all()


# ---- Random numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["token", "block"])
def test_no_number_serves_twice(monkeypatch, rule):
    """In a whole decoded text, no two decisions use the same random number."""
    used: Counter = Counter()
    philox = reference.philox

    def recording(seed, index, position, offset, stream):
        rows = zip(
            *(torch.as_tensor(t).expand(len(seed)).tolist() for t in (seed, position, offset)),
            index.tolist(),
            strict=True,
        )
        for s, p, row, columns in rows:
            used.update((s, p, row, stream, n) for n in columns)
        return philox(seed, index, position, offset, stream)

    monkeypatch.setattr(reference, "philox", recording)
    monkeypatch.setattr(reference, "BLOCK", 4)
    target, draft = (Rows.random(6, 1, random_state).table.float() for random_state in (1, 2))
    text: list[int] = []
    lengths = set()
    while len(text) < 14:
        common = {"params": SamplingParams(), "seed": 3, "position": len(text), "backend": "reference"}
        context = [text[-1] + 1 if text else 0] + [0] * len(FORK)  # the rows of the tables
        for row in range(len(context)):
            if children := [node for node, parent in enumerate(FORK) if parent == row - 1]:
                drawn = draft_children(draft[context[row]][None], len(children), offset=row, **common)
                for child, token in zip(children, drawn.tokens[0].tolist(), strict=True):
                    context[child + 1] = token + 1
        tokens = torch.tensor([context[1:]]) - 1
        out = verify_tree(target[None, context], tokens, torch.tensor(FORK), draft[None, context], rule=rule, **common)
        text += out.tokens[0, : int(out.num_emitted)].tolist()
        lengths.add(int(out.num_emitted))
    assert len(lengths) > 1 and len(used) > 100
    assert max(used.values()) == 1, [number for number, times in used.items() if times > 1][:5]


# ---- Backends --------------------------------------------------------------------------------------------------------


FAST = [b for b in TREE_BACKENDS if b != "reference"]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("fast", FAST)
def test_parity(fast, rule, sampling):
    near_ties = sequences = 0
    dtypes = itertools.cycle((torch.float32, torch.bfloat16, torch.float16))
    for i, (name, vocabulary) in enumerate(itertools.product(TREES, (1, 5, 40, 1100, 2500))):
        dtype, draft_dtype = next(dtypes), next(dtypes)
        inputs = random_tree_step(
            TREES[name], 12, vocabulary, rule=rule, dtype=dtype, draft_dtype=draft_dtype, temperature=MIXED,
            random_state=i, similar=i % 4 > 0, reduced=(2 * vocabulary + 2) // 3 if i % 3 == 0 else 0,
            **SAMPLING[sampling],
        )  # fmt: skip
        nodes = inputs.node_tokens.shape[1]
        if i % 2:
            inputs = inputs.replace(num_nodes=torch.arange(12) % (nodes + 1))
        inputs = inputs.map(LAYOUTS[sorted(LAYOUTS)[i % len(LAYOUTS)]])
        near_ties += assert_same_tree_step(inputs.run(fast), *inputs.reference(), f"{name} V={vocabulary} {dtype}")
        sequences += 12
        if nodes:
            logits = inputs.target_logits if inputs.draft_logits is None else inputs.draft_logits
            row = i % (nodes + 1)
            arguments = (logits[:, row], row, path_of(inputs.parents[0].tolist(), row), 1 + i % 9)
            near_ties += assert_same_children(inputs.draft(*arguments, fast), *inputs.reference_draft(*arguments))
    assert near_ties < max(2, 2e-3 * sequences)


@pytest.mark.parametrize("rule", TREE_RULES)
def test_batch_invariance(backend, rule):
    """The same results, bit for bit, in a permuted batch, alone, and beside sequences with other trees."""
    inputs = random_tree_step(
        TREES["several"], 6, 1500, rule=rule, temperature=MIXED, random_state=5, **SAMPLING["all"]
    )
    inputs = inputs.replace(num_nodes=torch.tensor([7, 5, 7, 0, 6, 7]))
    together = inputs.run(backend)
    for index in (torch.tensor([4, 2, 0, 5, 1, 3]), torch.tensor([1]), torch.tensor([4])):
        assert identical(inputs.map(lambda t, index=index: t[index]).run(backend), [t[index] for t in together])


def test_build_info_lists_the_operations():
    operations = {b["backend"]: b["operations"] for b in build_info()["backends"]}
    assert {b for b, names in operations.items() if "verify_tree" in names} == set(TREE_BACKENDS)
    for backend in operations.keys() - set(TREE_BACKENDS):
        with pytest.raises(
            RuntimeError, match=f"^backend '{backend}' cannot run here: it has no draft_children; allowed"
        ):
            draft_children(torch.zeros(1, 3), 1, SamplingParams(), seed=0, position=0, offset=0, backend=backend)
