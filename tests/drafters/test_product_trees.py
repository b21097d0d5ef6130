"""Trees of marginals: their nodes against an enumeration of all paths, and texts of heads that propose them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec.drafters.tree_paths import BestPaths, StaticPaths, likely_paths, read_paths

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
@given(marginals, st.integers(1, 12))
def test_the_most_probable_paths(log_q, nodes):
    given = torch.tensor(log_q)
    ordered, columns = given.sort(dim=-1, descending=True, stable=True)
    columns = columns.where(ordered > -torch.inf, -1)
    best = BestPaths(nodes, CPU)
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
        expected = sorted(scores.values(), reverse=True)[:nodes]
        assert [scores[path] for path in kept] == pytest.approx(expected)


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
    paths = likely_paths(40, 4, 0.6)
    assert len(paths) == 40 and read_paths("paths", paths, 4, 40) == paths
