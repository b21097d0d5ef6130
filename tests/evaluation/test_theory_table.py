"""Theory beside measurement, on cells of results.json whose times are made by hand."""

from __future__ import annotations

import math

import pytest
from specdec.evaluation.theory import expected_speedup, expected_tau
from specdec.evaluation.theory_table import HEAD, best_of, lines_of, rows_of, words_of

FORWARD, LOOP = 0.010, 0.001  # of a plain step


def cell(k: int, alpha: float, tau: float, width: float, c: float, loop: float = LOOP, **more) -> dict:
    """A cell of 100 steps."""
    parts = {"draft_forwards": k * c * FORWARD, "target_forwards": width * FORWARD, "kernels": 0.0, "loop": loop}
    step = sum(parts.values())
    shares = {
        name: parts[part] / step for name, part in zip(("draft", "target", "kernels", "loop"), parts, strict=True)
    }
    seconds = {part: 100 * taken for part, taken in parts.items()} | {"prefill": 5.0}
    speedup = tau * (FORWARD + LOOP) / step
    return {
        "id": f"draft k={k}", "method": "model" if k else "plain", "rule": "token", "num_drafts": k, "tree": None,
        "temperature": 0.0, "batch": 1, "top_k": None, "top_p": None, "min_p": None,
        "rounds": [{"seconds": 100 * step + 5, "tokens": 100 * tau, "steps": 100, "seconds_by_part": seconds}],
        "alpha": alpha, "tau": tau, "shares": shares, "speedup": {"over_plain": {"median": speedup}},
    } | more  # fmt: skip


PLAIN = cell(0, None, 1.0, 1.0, 0.0)


def test_where_the_theorem_holds_it_predicts_what_was_measured():
    """No width, no loop, independent drafts."""
    plain = cell(0, None, 1.0, 1.0, 0.0, loop=0.0)
    one = cell(4, 0.8, expected_tau(0.8, 4), 1.0, 0.1, loop=0.0)
    one["speedup"]["over_plain"]["median"] = one["tau"] / 1.4
    (row,) = rows_of([plain, one])
    assert row.c == pytest.approx(0.1) and row.width == pytest.approx(1) and row.overhead == 0
    assert row.speedup == pytest.approx(row.refined) == pytest.approx(row.measured_speedup)
    assert all(factor == pytest.approx(1) for factor in row.reasons.values())
    assert row.predicted == {"c": row.c, "tau": row.tau, "speedup": row.speedup}
    assert lines_of([row])[0][-1] == "-" and len(lines_of([row])[0]) == len(HEAD)


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"width": 1.5}, "target's forward over K + 1"),
        ({"tau": 2.6}, "acceptance that is not the same"),
        ({"loop": 0.005}, "time outside the models"),
    ],
)
def test_each_reason_is_found(changed, reason):
    settings = {"k": 4, "alpha": 0.8, "tau": expected_tau(0.8, 4), "width": 1.0, "c": 0.1} | changed
    (row,) = rows_of([PLAIN, cell(**settings)])
    assert row.measured_speedup < row.speedup and reason in lines_of([row])[0][-1]
    assert math.prod(row.reasons.values()) == pytest.approx(row.measured_speedup / row.speedup)
    assert row.speedup == pytest.approx(expected_speedup(0.8, 0.1, 4))


def test_the_best_k_predicted_and_found():
    """A forward over several tokens takes longer, so fewer drafts are best than the theorem says."""
    cells = [PLAIN, *(cell(k, 0.8, expected_tau(0.8, k), 1 + 0.2 * k, 0.1) for k in (1, 2, 4, 8))]
    (best,) = best_of(cells)
    assert best.tried == [1, 2, 4, 8] and best.found == best.refined == 4 and best.predicted == 5
    assert "K = 4 was the fastest" in words_of(best) and "theorem 3.8 says 5" in words_of(best)
    (slow,) = best_of([PLAIN, cell(2, 0.1, 1.1, 1.5, 0.5)])
    assert slow.found == slow.predicted == 0
    assert "none was faster than plain" in words_of(slow) and "not to draft" in words_of(slow)


def test_cells_that_say_too_little_are_left_out():
    other = cell(4, 0.8, 3.0, 1.2, 0.1)
    left_out = [
        other | {"shares": None}, other | {"num_drafts": "auto"}, other | {"tree": 16}, other | {"alpha": None},
        other | {"temperature": 1.0},
    ]  # fmt: skip
    assert rows_of([PLAIN, *left_out]) == [] and len(rows_of([PLAIN, *left_out, other])) == 1
    assert rows_of([other]) == [] and best_of([]) == []
