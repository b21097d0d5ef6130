"""The formulas of Leviathan et al. against the paper's tables and enumerations, and the simulator against them."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from specdec.evaluation import theory
from specdec.evaluation.simulate import draw_emitted, simulate
from support.commands import refused, run
from support.table_trees import BUSHY

# Table 1 of arXiv 2211.17192, for c = c_hat = 0: alpha, gamma, operations, speed.
TABLE_1 = (
    (0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44), (0.8, 5, 1.63, 3.69), (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
)  # fmt: skip
# The settings of table 2, T5-XXL with three drafts on two tasks at two temperatures. Table 2 itself has the measured
# speed-ups; table 4 has, for the same rows, c and the expected ones: gamma, alpha, c, expected.
TABLE_4 = (
    (7, 0.75, 0.02, 3.2), (7, 0.80, 0.04, 3.3), (7, 0.82, 0.11, 2.5),
    (7, 0.62, 0.02, 2.3), (5, 0.68, 0.04, 2.4), (3, 0.71, 0.11, 2.0),
    (5, 0.65, 0.02, 2.4), (5, 0.73, 0.04, 2.6), (3, 0.74, 0.11, 2.0),
    (5, 0.53, 0.02, 1.9), (3, 0.55, 0.04, 1.8), (3, 0.56, 0.11, 1.6),
)  # fmt: skip


@pytest.mark.parametrize("alpha, k, operations, speed", TABLE_1)
def test_table_1_of_the_paper(alpha, k, operations, speed):
    said = run("simulate", "--alpha", alpha, "-k", k, "--steps", 20_000, "--json")
    (row,) = json.loads(said.stdout)["rows"]
    assert (round(row["operations"], 2), round(row["speedup"], 2)) == (operations, speed)
    for name in ("operations", "speedup", "tau"):
        drawn = row[f"simulated_{name}"]
        assert 0 < drawn["error"] < 0.02 * row[name] and abs(drawn["mean"] - row[name]) < 5 * drawn["error"]


@pytest.mark.parametrize("k, alpha, c, expected", TABLE_4)
def test_the_rows_of_table_2_of_the_paper(k, alpha, c, expected):
    """The paper rounds alpha and c, so its own number lies between those of what they may have been."""
    least = theory.expected_speedup(alpha - 0.005, c + 0.005, k)
    most = theory.expected_speedup(alpha + 0.005, c - 0.005, k)
    assert least - 0.05 <= expected <= most + 0.05 and most - least < 0.3


def test_corners():
    assert [theory.expected_tau(a, k) for a, k in ((0, 5), (1, 5), (0.3, 0), (0.5, 1))] == [1, 6, 1, 1.5]
    assert theory.expected_speedup(0.7, 3.0, 0) == 1
    assert theory.expected_speedup(1, 0, 5) == 6
    assert theory.tau_by_position([0.5, 0.25]) == 1.625 and theory.tau_by_position([]) == 1


def test_the_closed_form():
    for alpha, k in itertools.product((0.01, 0.5, 0.93, 0.999), (1, 4, 32)):
        assert theory.expected_tau(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha), rel=1e-12)


def test_the_best_k_is_none_exactly_where_alpha_is_not_above_c():
    """Corollary 3.9, and what it promises where alpha is above c."""
    for alpha, c in itertools.product(range(21), range(25)):
        alpha, c = alpha / 20, c / 20
        best = theory.best_k(alpha, c, 20)
        assert (best == 0) == (alpha <= c), (alpha, c)
        gained = theory.expected_speedup(alpha, c, best)
        assert gained >= theory.sure_speedup(alpha, c) >= 1
    assert theory.best_k(0.8, 0.02, 0) == 0 and theory.best_k(1, 0, 7) == 7


def test_trees():
    """A chain is a tree; and what is accepted of a bushy one, by all outcomes of its tests."""
    alpha = 0.6
    assert theory.expected_tree_tau((alpha,), (-1, 0, 1)) == pytest.approx(theory.expected_tau(alpha, 3))
    acceptance, total = theory.children_alike(alpha, 2), 0.0
    for outcome in itertools.product((True, False), repeat=len(BUSHY)):
        chance = math.prod(alpha if passed else 1 - alpha for passed in outcome)
        node, emitted = -1, 1
        while (child := next((c for c, p in enumerate(BUSHY) if p == node and outcome[c]), None)) is not None:
            node, emitted = child, emitted + 1
        total += chance * emitted
    assert theory.expected_tree_tau(acceptance, BUSHY) == pytest.approx(total, rel=1e-12)
    drawn = draw_emitted(alpha, BUSHY, 50_000, seed=3)
    assert drawn.mean() == pytest.approx(total, abs=5 * drawn.std() / math.sqrt(50_000))


@pytest.mark.parametrize("alpha, tree, nodes", [(0.6, 12, 12), (1.0, 12, 4), (0.0, 12, 0)])
def test_a_simulated_tree(alpha, tree, nodes):
    """More paths than a chain of its depth; where every draft is accepted it is that chain, and where none is, nothing
    is drafted."""
    found = simulate(alpha, 0.1, 4, 0.1, steps=20_000, tree=tree)
    chain = theory.expected_tau(alpha, 4)
    assert found.nodes == nodes and (found.tau > chain if nodes == 12 else found.tau == pytest.approx(chain))
    assert abs(found.simulated_tau.mean - found.tau) <= 5 * found.simulated_tau.error
    depth = 4 if nodes else 0
    assert found.speedup == pytest.approx(found.tau / (depth * 0.1 + 1))
    assert found.operations == pytest.approx((nodes * 1.1 + 1) / found.tau)


def test_a_seed_gives_the_same_numbers():
    assert simulate(0.7, 0.1, 4, 0.1, 1000, seed=5) == simulate(0.7, 0.1, 4, 0.1, 1000, seed=5)
    assert simulate(0.7, 0.1, 4, 0.1, 1000, seed=5) != simulate(0.7, 0.1, 4, 0.1, 1000, seed=6)


def test_the_table_of_the_command():
    said = run("simulate", "--alpha", 0.8, "--c", 0.1, "-k", "2,5", "--steps", 1000).stdout
    assert "c_hat 0.1" in said and "2.033" in said and "The best K up to 5 is 5" in said
    assert "some K gains at least 1.64 times" in said
    assert "No K pays" in run("simulate", "--alpha", 0.1, "--c", 0.1, "-k", "0,1", "--steps", 100).stdout


@pytest.mark.parametrize(
    "options, said",
    [
        (("--alpha", "1.01"), "--alpha: got 1.01"),
        (("--alpha", "nan"), "--alpha: got nan"),
        (("--alpha", "0.5", "--c", "-0.1"), "--c: got -0.1"),
        (("--alpha", "0.5", "--c-hat", "inf"), "--c-hat: got inf"),
        (("--alpha", "0.5", "-k", "1,,2"), "--num-drafts: got '1,,2'"),
        (("--alpha", "0.5", "-k", "-1"), "--num-drafts: got '-1'"),
        (("--alpha", "0.5", "--tree", "0"), "--tree: got 0"),
        (("--alpha", "0.5", "--steps", "1"), "--steps: got 1"),
    ],
)
def test_what_simulate_refuses(options, said):
    assert said in refused("simulate", *options)


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: theory.expected_tau(-0.1, 3), "alpha: got -0.1"),
        (lambda: theory.expected_tau(0.5, -1), "k: got -1"),
        (lambda: theory.expected_tau(0.5, 2.0), "k: got 2.0"),
        (lambda: theory.expected_speedup(0.5, math.inf, 1), "c: got inf"),
        (lambda: theory.best_k(0.5, 0.1, -1), "most: got -1"),
        (lambda: theory.expected_tree_tau((0.5,), (-1, -1)), "acceptance: got"),
        (lambda: theory.expected_tree_tau((0.5,), (0,)), "parents: got"),
        (lambda: theory.expected_tree_tau((0.7, 0.7), (-1,)), "acceptance: got"),
    ],
)
def test_what_the_formulas_refuse(call, said):
    with pytest.raises(ValueError, match=said):
        call()
