"""Learned acceptance: by position, by row, and how fast it follows."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from specdec.drafters.acceptance import FIRST_GUESS, Acceptance, RowAcceptance
from specdec.loop.draft_length import RowResult

K = 6


def emitted_by(rows: RowAcceptance, which: list[int]) -> np.ndarray:
    """Tokens that these rows are expected to emit together, for each K from 0 on."""
    return len(which) + np.concatenate(([0.0], rows.reached(which).sum(0).cumsum()))


def run(rows: RowAcceptance, size: int, steps: int, chance: Callable[[int, int], float], seed: int = 0) -> None:
    """Steps of ``size`` rows; ``chance`` of a row and a position."""
    draw = random.Random(seed)
    for _ in range(steps):
        accepted = [next((i for i in range(K) if draw.random() >= chance(row, i)), K) for row in range(size)]
        rows.record(1, [RowResult(row, K, a, a + 1, False) for row, a in enumerate(accepted)])


def emitted(chances: list[float]) -> np.ndarray:
    return 1 + np.concatenate(([0.0], np.cumprod(chances).cumsum()))


def test_at_first_it_is_a_guess():
    rows = RowAcceptance(Acceptance(K), K, 3)
    assert rows.common.by_position() == pytest.approx([FIRST_GUESS] * K)
    assert emitted_by(rows, [0, 2]) == pytest.approx(2 * emitted([FIRST_GUESS] * K))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
def test_it_is_learned(alpha):
    rows = RowAcceptance(Acceptance(K), K, 8)
    run(rows, 8, 200, lambda row, i: alpha)
    assert rows.common.by_position()[:2] == pytest.approx([alpha] * 2, abs=0.05)
    assert emitted_by(rows, [*range(8)]) == pytest.approx(8 * emitted([alpha] * K), rel=0.1)


def test_positions_differ():
    """Lookups: often nothing is found, but what is found is right."""
    chances = [0.3, 0.9, 0.9, 0.9, 0.9, 0.9]
    rows = RowAcceptance(Acceptance(K), K, 8)
    run(rows, 8, 200, lambda row, i: chances[i])
    assert rows.common.by_position() == pytest.approx(chances, abs=0.1)


def test_a_position_that_was_not_tested_is_like_the_one_before():
    rows = RowAcceptance(Acceptance(K), K, 1)
    for i in range(400):
        rows.record(1, [RowResult(0, 2, 2 if i % 2 else 0, 1, False)])
    first, second, *others = rows.common.by_position()
    assert (first, second) == pytest.approx((0.5, 1.0), abs=0.08) and others == pytest.approx([second] * 4)


def test_a_row_that_is_unlike_the_others_is_known():
    rows = RowAcceptance(Acceptance(K), K, 8)
    run(rows, 8, 100, lambda row, i: 0.05 if row == 3 else 0.9)
    alone = [emitted_by(rows, [row])[K] for row in range(8)]
    assert alone[3] < 2 < 3.5 < min(alone[:3] + alone[4:])
    rows.begin(3)  # a new sequence begins with what is common
    assert emitted_by(rows, [3])[K] == pytest.approx(emitted(rows.common.by_position().tolist())[K])


def test_a_change_is_noticed_within_some_steps():
    rows = RowAcceptance(Acceptance(K), K, 1)
    run(rows, 1, 300, lambda row, i: 0.9)
    run(rows, 1, 12, lambda row, i: 0.0)
    assert emitted_by(rows, [0])[1] < 1.4
    run(rows, 1, 300, lambda row, i: 0.0)
    run(rows, 1, 12, lambda row, i: 0.9)
    assert emitted_by(rows, [0])[1] > 1.5


def test_a_change_of_all_rows_is_noticed_at_once():
    rows = RowAcceptance(Acceptance(K), K, 8)
    run(rows, 8, 300, lambda row, i: 0.9)
    run(rows, 8, 5, lambda row, i: 0.0)
    assert rows.common.by_position()[0] < 0.6


def test_what_is_forgotten_leaves_probabilities():
    rows = RowAcceptance(Acceptance(K), K, 8)
    run(rows, 8, 100, lambda row, i: 0.1)
    rows.forget()
    faint = rows.common.by_position()
    assert (faint <= 1).all() and 0.4 < faint[0] < FIRST_GUESS
    run(rows, 8, 2, lambda row, i: 0.0)
    assert rows.common.by_position()[0] < 0.2


def test_it_is_passed_on_to_other_batches():
    common = Acceptance(K)
    run(RowAcceptance(common, K, 8), 8, 100, lambda row, i: 0.2)
    assert emitted_by(RowAcceptance(common, K, 2), [0])[1] == pytest.approx(1.2, abs=0.1)


def test_steps_that_are_recorded_together():
    one, together = RowAcceptance(Acceptance(K), K, 2), RowAcceptance(Acceptance(K), K, 2)
    results = [RowResult(row, K, (3 * i + row) % K, 1, False) for i in range(40) for row in range(2)]
    for i in range(0, 80, 2):
        one.record(1, results[i : i + 2])
    for i in range(0, 80, 8):
        together.record(4, results[i : i + 8])
    assert together.reached([0, 1]) == pytest.approx(one.reached([0, 1]), abs=0.03)
