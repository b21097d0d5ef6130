"""The formulas against the decoder: models whose acceptance is known exactly, through the real loop, by every rule that
has a formula."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from specdec import SpeculativeDecoder
from specdec.evaluation.theory import expected_tau, expected_tree_tau
from support.synthetic_acceptance import (
    block_tau,
    coupled_alpha,
    distributions,
    markov_model,
    sibling_acceptance,
    table,
)
from support.table_trees import BUSHY, TableTrees

from specdec_kernels import SamplingParams

RULES = ("token", "coupled", "block")
PARENTS = {"bushy": BUSHY, "wide": (-1, -1, -1), "deep": (-1, -1, 0, 0, 1, 2, 3, 5, 6, 7)}


def emitted_by_steps(alpha: float, k: int, rows: int, length: int, rule: str, parents=None) -> list[int]:
    """How many tokens each step emitted that drafted all it could: those near the end of a text draft fewer."""
    p, q = distributions(alpha)
    target = markov_model(table(p))
    draft = markov_model(table(q)) if parents is None else TableTrees(table(q), parents)
    decoder = SpeculativeDecoder(target, draft, k, tree=None if parents is None else len(parents))
    counts: list[int] = []
    result = decoder.generate(
        [[0]] * rows,
        max_new_tokens=length,
        params=SamplingParams(1.0),
        seed=list(range(rows)),
        eos_token_id=[],
        rule=rule,
        on_emit=lambda e: counts.append(len(e.tokens)) if e.drafted == k else None,
    )
    assert result.drafter_error is None and not any(result.status)
    return counts


def predicted(alpha: float, k: int, rule: str) -> float:
    p, q = distributions(alpha)
    if rule == "block":
        return block_tau(p, q, k)
    return expected_tau(alpha if rule == "token" else coupled_alpha(p, q), k)


def predicted_of_tree(alpha: float, parents) -> float:
    width = max(parents.count(parent) for parent in parents)
    return expected_tree_tau(sibling_acceptance(*distributions(alpha), width), parents)


def depth_of(parents) -> int:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return max(depths)


def check(counts: list[int], tau: float, tolerance: float) -> None:
    """``tolerance`` of tau is at least four standard errors, and tau is within it."""
    error = statistics.stdev(counts) / math.sqrt(len(counts))
    assert 4 * error < tolerance * tau, (len(counts), error)
    assert statistics.mean(counts) == pytest.approx(tau, rel=tolerance)


def rows_for(counts: list[int], tolerance: float, rows: int) -> int:
    """How many rows have enough steps, from those of a first run, with a fifth to spare."""
    relative = statistics.stdev(counts) / statistics.mean(counts)
    return math.ceil(1.2 * rows * (4 * relative / tolerance) ** 2 / len(counts))


def test_the_models_have_this_acceptance():
    for alpha in (0.5, 0.9):
        p, q = distributions(alpha)
        assert sum(map(min, p, q)) == pytest.approx(alpha) and sum(p) == pytest.approx(sum(q)) == pytest.approx(1)
        assert 0 < coupled_alpha(p, q) < alpha
        assert sum(sibling_acceptance(p, q, 1)) == pytest.approx(alpha)
        text = torch.tensor([[3, 0, 5, 2]])
        logits = markov_model(table(p))(text, use_cache=False).logits[0]
        torch.testing.assert_close(logits.softmax(-1), table(p)[text[0]].softmax(-1), atol=1e-5, rtol=1e-5)
    p, q = distributions(0.7)
    assert block_tau(p, q, 1) == pytest.approx(1.7)
    assert block_tau(p, q, 5) > expected_tau(0.7, 5)
    assert coupled_alpha(p, p) == pytest.approx(1) == sum(sibling_acceptance(p, p, 2))


@pytest.mark.parametrize("rule", RULES)
def test_a_chain_emits_what_is_predicted(rule):
    check(emitted_by_steps(0.7, 3, 120, 50, rule), predicted(0.7, 3, rule), 0.05)


def test_a_tree_emits_what_is_predicted():
    check(emitted_by_steps(0.7, depth_of(BUSHY), 100, 50, "token", BUSHY), predicted_of_tree(0.7, BUSHY), 0.05)


@pytest.mark.nightly
@pytest.mark.parametrize("k", range(1, 11))
@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("rule", RULES)
def test_chains_emit_within_one_percent(rule, alpha, k):
    first = emitted_by_steps(alpha, k, 100, 200, rule)
    check(emitted_by_steps(alpha, k, rows_for(first, 0.01, 100), 200, rule), predicted(alpha, k, rule), 0.01)


@pytest.mark.nightly
@pytest.mark.parametrize("parents", PARENTS.values(), ids=PARENTS)
@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.9])
def test_trees_emit_within_one_percent(parents, alpha):
    first = emitted_by_steps(alpha, depth_of(parents), 100, 200, "token", parents)
    rows = rows_for(first, 0.01, 100)
    check(
        emitted_by_steps(alpha, depth_of(parents), rows, 200, "token", parents),
        predicted_of_tree(alpha, parents),
        0.01,
    )
