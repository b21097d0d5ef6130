"""Trees of marginals: their nodes against an enumeration of all paths, and texts of heads that propose them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec import SpeculativeDecoder, load_head
from specdec.drafters.product_tree import ProductTrees
from specdec.drafters.tree_paths import BestPaths, StaticPaths, likely_paths, read_paths
from specdec.models.cache.features import FeatureStore
from specdec.stats import Timer
from support.heads import (
    HIDDEN,
    LAYERS,
    V,
    affinities,
    exact_medusa,
    permutation,
    predictable_target,
    random_head,
    write,
)

from specdec_kernels import Rule, SamplingParams, SamplingTensors, draft_children

PROMPTS = [[1, 2, 3, 9, 9, 4], [5, 6], [3, 3, 1, 2, 8, 1, 7, 0, 15, 4, 4]]
CPU = torch.device("cpu")


def paths_of(tokens: torch.Tensor, parents: torch.Tensor) -> list[tuple[int, ...] | None]:
    """The tokens down to each node of one tree; None where there is no such node."""
    found: list[tuple[int, ...] | None] = []
    for node, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        assert -1 <= parent < node
        before = () if parent < 0 else found[parent]
        found.append(None if token < 0 or before is None else (*before, token))
    return found


def enumerated(log_q: list[list[float]]) -> dict[tuple[int, ...], float]:
    """The log-probability of every path, as far as it is not -inf."""
    scores = {}
    for depth in range(1, len(log_q) + 1):
        for path in itertools.product(range(len(log_q[0])), repeat=depth):
            scores[path] = sum(log_q[i][token] for i, token in enumerate(path))
    return {path: score for path, score in scores.items() if score > -torch.inf}


def likely_path(log_q: list[list[float]], length: int) -> tuple[int, ...]:
    """The most likely token of each depth, of equal ones the first."""
    return tuple(own.index(max(own)) for own in log_q[:length])


# Few different probabilities, so that many paths are equally probable, and some tokens that there are not.
levels = st.sampled_from([0.0, -0.125, -0.5, -1.0, -2.0, -torch.inf])
marginals = st.tuples(st.integers(1, 3), st.integers(1, 4)).flatmap(
    lambda size: st.lists(
        st.lists(st.lists(levels, min_size=size[1], max_size=size[1]), min_size=size[0], max_size=size[0]),
        min_size=1,
        max_size=3,
    )
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(marginals, st.integers(1, 12), st.integers(0, 12))
def test_the_most_probable_paths(log_q, nodes, chain):
    given = torch.tensor(log_q)
    ordered, columns = given.sort(dim=-1, descending=True, stable=True)
    columns = columns.where(ordered > -torch.inf, -1)
    chain = min(chain, nodes)
    best = BestPaths(nodes, CPU, chain)
    missing = best.width - given.shape[-1]
    ordered, columns = (
        torch.nn.functional.pad(part, (0, missing), value=value)[..., : best.width]
        for part, value in ((ordered, -torch.inf), (columns, -1))
    )
    tokens, parents = best.choose(columns, ordered)
    assert tokens.shape == parents.shape == (len(log_q), nodes)
    for b, own in enumerate(log_q):
        scores, found = enumerated(own), paths_of(tokens[b], parents[b])
        kept = [path for path in found if path is not None]
        assert len(set(kept)) == len(kept) and None not in found[: len(kept)]
        likely = max((path for path in scores if path == likely_path(own, len(path))), key=len, default=())[:chain]
        assert all(likely[:length] in kept for length in range(1, len(likely) + 1))
        others = sorted((scores[path] for path in scores if path != likely[: len(path)]), reverse=True)
        expected = others[: nodes - len(likely)]
        assert [scores[path] for path in kept if path != likely[: len(path)]] == pytest.approx(expected)


def test_greedy_trees_hold_the_chain_of_the_most_likely_tokens():
    """The flatter the distributions, the more likely are short paths; half of the nodes are a chain nevertheless."""
    given = SimpleNamespace(nodes=8, rule=Rule.TOKEN, backend="reference", timer=Timer())
    sampling, one = SamplingTensors(torch.zeros(1)), {"seed": torch.tensor([0]), "position": torch.tensor([5])}
    step = SimpleNamespace(greedy=True, sampling=sampling, allowed_on_device=torch.full((1,), 6), **one)
    tree = ProductTrees(given, 6, CPU).tree([torch.arange(9.0)[None] / 100] * 6, step)
    paths = paths_of(tree.tokens[0], tree.parents[0])
    assert paths[:4] == [(8,) * length for length in (1, 2, 3, 4)] and [len(path) for path in paths[4:]] == [1] * 4


def test_probabilities_a_little_above_one_do_not_come_before_their_prefix():
    tokens, log_q = torch.tensor([[[5, 6]]]).repeat(1, 3, 1), torch.tensor([[[2e-7, -20.0]]]).repeat(1, 3, 1)
    tokens, parents = BestPaths(2, CPU).choose(tokens, log_q)
    assert tokens.tolist() == [[5, 5]] and parents.tolist() == [[-1, 0]]


def test_static_paths():
    given = [[1], [0, 1], [0], [0, 1, 0], [0, 0], [2, 0], [2]]
    paths = read_paths("choices", given, 3, 5)
    tokens = torch.tensor([[[10, 11, 12], [20, 21, 22]]])
    static = StaticPaths(paths, CPU)
    assert static.width == 3 and static.longest == 3
    chosen = static.choose(tokens, torch.zeros(1, 2, 3))  # a step that drafts two tokens only
    assert paths_of(chosen[0][0], chosen[1][0]) == [(10,), (11,), (12,), (10, 20), (10, 21), (12, 20), None]
    log_q = torch.tensor([[[-1.0, -2.0, -torch.inf], [-1.0, -torch.inf, -torch.inf]]])
    chosen = static.choose(tokens, log_q)
    assert paths_of(chosen[0][0], chosen[1][0]) == [(10,), (11,), None, (10, 20), None, None, None]
    assert static.rows[0] == ([], [0, 1, 2]) and static.rows[5] == ([0, 4], [6]) and static.rows[7] == ([0, 4, 6], [])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([[0], [1, 0]], r"got the path \[1, 0\] without \[1\]"),
        ([[0], [0, 0, 0]], r"got the path \[0, 0, 0\] without \[0, 0\]"),
        ([[0], [1], [0]], r"got the path \[0\] twice"),
        ([[0], [5]], r"got the path \[5\], allowed: .* 1 to 3 ranks from 0 to 4"),
        ([[0], [-1]], r"got the path \[-1\]"),
        ([[0], [True]], r"got the path \[True\]"),
        ([[0], []], r"got the path \[\]"),
        ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], r"got the path \[0, 0, 0, 0\], allowed: "),
        ([], r"got \[\]"),
        ([0, 1], r"got \[0, 1\]"),
        (None, "got None"),
    ],
)
def test_paths_are_checked(given, told):
    with pytest.raises(ValueError, match=f"^choices: {told}"):
        read_paths("choices", given, 3, 5)


def test_the_shape_of_sampled_trees():
    """(0,) 0.6, (0, 0) 0.36, (1,) 0.24, (0, 0, 0) 0.216, (0, 1) and (1, 0) 0.144, (2,) 0.096."""
    assert likely_paths(4, 5, 0.6) == [(0,), (1,), (0, 0), (0, 0, 0)]
    assert likely_paths(4, 2, 0.6) == [(0,), (1,), (0, 0), (0, 1)]
    assert likely_paths(1030, 1, 0.6) == [(rank,) for rank in range(1024)]
    paths = likely_paths(40, 4, 0.6)
    assert len(paths) == 40 and read_paths("paths", paths, 4, 40) == paths


# ---- heads -----------------------------------------------------------------------------------------------

ORDER = {"medusa": 1, "dflash": 2, "peagle": 2, "dspark": 2}
SAMPLED = {"params": SamplingParams(1.0), "seed": [3, 4, 5]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    return {kind: write(folder / kind, *(exact_medusa() if kind == "medusa" else random_head(kind))) for kind in ORDER}


def head_of(folders, kind, **arguments):
    return load_head(folders[kind], predictable_target(ORDER[kind]), check=False, **arguments)


def decoded(drafter, order, tree=None, num_drafts=4, prompts=PROMPTS, new=24, **arguments):
    arguments = {"rule": "coupled"} | arguments
    decoder = SpeculativeDecoder(predictable_target(order), drafter, num_drafts, tree=tree)
    result = decoder.generate(prompts, max_new_tokens=new, eos_token_id=[], **arguments)
    assert result.drafter_error is None
    return result


@pytest.mark.parametrize("kind", ("medusa", "dflash", "peagle"))
def test_texts_are_those_of_plain_decoding(kind, folders):
    drafter, order = head_of(folders, kind), ORDER[kind]
    penalised = {"params": SamplingParams(0.9, repetition_penalty=1.4), "seed": [1, 2, 3]}
    for drawn in ({}, SAMPLED, penalised)[: 3 if kind == "medusa" else 2]:
        plain = decoded(None, order, num_drafts=0, **drawn)
        result = decoded(drafter, order, 13, **drawn)
        assert result.tokens == plain.tokens and result.stats.accepted > 0


def test_trees_accept_more_than_chains(folders):
    """The third head's second best token is right, and its best one is wrong, so a chain of three gets two."""
    target, now = predictable_target(1), affinities(1)[0]
    config, tensors = exact_medusa()
    following = now.argmax(0)
    third = following[following[following[torch.arange(V)]]]
    spoiled = now[:, third].clone()
    best, column = spoiled.argmax(0), torch.arange(V)
    spoiled[(best + 1) % V, column] = spoiled[best, column] + 1
    tensors["2.1.weight"][:, :V] = (2 / HIDDEN) ** 0.5 * spoiled @ permutation(LAYERS).T
    drafter = load_head(write(folders["medusa"].parent / "spoiled", config, tensors), target, check=False)
    prompt, plain = PROMPTS[:1], decoded(None, 1, num_drafts=0, prompts=PROMPTS[:1])
    taus = []
    for tree in (None, 4, 12):
        result = decoded(drafter, 1, tree, 3, prompt)
        assert result.tokens == plain.tokens
        taus.append(result.stats.tau)
    assert taus[0] <= taus[1] and taus[0] < 2.8 and taus[2] > 3.2


def test_trees_of_sampled_text_are_drawn_by_the_targets_race(folders):
    """They hold the chain, which is drawn by the same race, and more: so the same texts take fewer steps."""
    drafter, prompts = head_of(folders, "medusa"), [[i, i + 1] for i in range(12)]
    drawn = {"prompts": prompts, "params": SamplingParams(3.0), "seed": list(range(12))}
    chain, tree = (decoded(drafter, 1, nodes, 3, **drawn) for nodes in (None, 13))
    assert tree.tokens == chain.tokens and tree.stats.tau > chain.stats.tau + 0.3, (chain.stats.tau, tree.stats.tau)


def test_given_paths(folders):
    """The exact head's best tokens are right, so nothing is accepted of a tree without them."""
    right = [[0], [0, 0], [0, 0, 0], [1]]
    for choices in (right, [[1], [2], [1, 0]]):
        drafter = head_of(folders, "medusa", choices=choices)
        result = decoded(drafter, 1, len(choices) + 2, 3)
        assert result.tokens == decoded(None, 1, num_drafts=0).tokens
        assert result.stats.tau >= 2.5 if choices is right else result.stats.accepted == 0
    drafter = head_of(folders, "medusa", choices=right)
    with pytest.raises(ValueError, match="tree: got 3 with 4 choices, allowed: 4 or more"):
        decoded(drafter, 1, 3, 3)
    with pytest.raises(ValueError, match="num_drafts: got 2 with choices of 3 tokens, allowed: 3 or more"):
        decoded(drafter, 1, 9, 2)
    with pytest.raises(ValueError, match="choices: got the path .0, 0, 0, 0., allowed: a list of paths of 1 to 3"):
        head_of(folders, "medusa", choices=[*right, [0, 0, 0, 0]])


def test_drafts_that_depend_on_each_other_make_no_product(folders):
    with pytest.raises(ValueError, match="tree: got 8 with draft=dspark, allowed: None, or a drafter"):
        decoded(head_of(folders, "dspark"), 2, 8)
    with pytest.raises(ValueError, match="choices: got a value with a head of the format 'dspark', allowed: None"):
        head_of(folders, "dspark", choices=[[0]])


@pytest.mark.parametrize("rule", (pytest.param("token", marks=pytest.mark.nightly), "block"))
def test_sampled_texts_have_the_distribution_of_the_target(rule, folders):
    """The first two tokens of 3,000 sequences, against the target's probabilities: 99.99 % quantiles of chi-square."""
    count, params = 3000, SamplingParams(3.0)
    settings = {"prompts": [PROMPTS[0]] * count, "new": 3, "params": params, "seed": list(range(count)), "rule": rule}
    result = decoded(head_of(folders, "medusa"), 1, 7, 3, **settings)
    assert 0.2 * count < result.stats.accepted < 0.8 * result.stats.steps * 2
    p = (affinities(1)[0] / 3.0).softmax(0)  # [next, now]
    first = p[:, PROMPTS[0][-1]]
    pairs = (p * first).T  # [first, second]
    counts = torch.zeros(V, V).index_put_(tuple(torch.tensor(result.tokens)[:, :2].T), torch.ones(()), accumulate=True)
    for observed, expected in ((counts.sum(1), first), (counts.flatten(), pairs.flatten())):
        enough = expected * count >= 5
        terms = (observed - expected * count)[enough].square() / (expected * count)[enough]
        degrees = int(enough.sum())
        assert terms.sum() < degrees + 3.72 * (2 * degrees) ** 0.5 + 10 and degrees > 15


def test_sampled_children_are_all_that_were_drawn(folders):
    """Row r of q is what its children were drawn from, with r as the offset, and the tree has all of them in order."""
    torch.manual_seed(0)
    logits, seed, position = [torch.randn(2, 9) for _ in range(3)], torch.tensor([5, 6]), torch.tensor([4, 9])
    given = SimpleNamespace(nodes=9, rule=Rule.TOKEN, backend="reference", timer=Timer())
    trees = ProductTrees(given, 3, CPU, read_paths("choices", [[0], [2], [0, 0], [0, 1], [2, 3], [0, 1, 0]], 3, 9))
    rows = {"seed": seed, "position": position, "last_two": torch.zeros(2, 2, dtype=torch.int64)}
    step = SimpleNamespace(greedy=False, sampling=SamplingTensors(torch.ones(2)), **rows)
    tree = trees.tree(logits, step)
    assert tree.parents.tolist() == [-1, -1, 0, 0, 1, 3]
    for row, depth, children in ((0, 0, [0, 1]), (1, 1, [2, 3]), (2, 1, [4]), (4, 2, [5])):
        assert torch.equal(tree.logits[:, row], logits[depth])
        drawn = draft_children(
            logits[depth], len(children), SamplingParams(1.0), seed=seed, position=position, offset=row
        )
        assert torch.equal(tree.tokens[:, children], drawn.tokens)
    short = trees.tree(logits[:1], step)
    assert (short.tokens[:, 2:] == -1).all() and torch.equal(short.tokens[:, :2], tree.tokens[:, :2])
    assert short.logits.shape == tree.logits.shape


def test_features_move_with_their_tokens():
    """Slots 5 and 3 of the first row go to 2 and 3; the second row has nothing to move, and uses its last slot."""
    store = FeatureStore((0,), lambda states: states, 2, 7, 1, torch.float32, CPU)
    store.features.copy_(torch.arange(14.0).view(2, 7, 1))
    store.tokens.copy_(torch.arange(14).view(2, 7))
    store.move(torch.tensor([[5, 3], [6, 6]]), torch.tensor([[2, 3], [6, 6]]))
    assert store.tokens.tolist() == [[0, 1, 5, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13]]
    assert torch.equal(store.features[..., 0], store.tokens.float())
