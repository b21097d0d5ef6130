"""The test of counted outcomes is scipy's, and rare, impossible and rounded probabilities count as they should."""

from __future__ import annotations

import pytest
from scipy import stats
from specdec.evaluation.verify.chi_square import chi_square

DISTRIBUTION = {"a": 0.5, "b": 0.25, "c": 0.25}
COUNTS = {"a": 520, "b": 210, "c": 270}


def test_it_is_pearsons_test():
    found = chi_square(COUNTS, DISTRIBUTION, 1e-3)
    expected = stats.chisquare(list(COUNTS.values()), [1000 * p for p in DISTRIBUTION.values()])
    assert (found.degrees, found.worst) == (2, "b")
    assert found.statistic == pytest.approx(expected.statistic)
    assert found.p_value == pytest.approx(expected.pvalue)


def test_rare_outcomes_count_as_one():
    """Each is expected 20 times, which alone would be too few."""
    counts, rare = {**COUNTS, "d": 2, "e": 3}, {"a": 0.48, "b": 0.24, "c": 0.24, "d": 0.02, "e": 0.02}
    found = chi_square(counts, rare, 1e-3)
    draws = sum(counts.values())
    expected = stats.chisquare([520, 210, 270, 5], [draws * p for p in (0.48, 0.24, 0.24, 0.04)])
    assert (found.degrees, found.worst) == (3, None)
    assert found.p_value == pytest.approx(expected.pvalue)


def test_what_cannot_be_drawn_fails():
    for distribution in (DISTRIBUTION, {**DISTRIBUTION, "d": 0.0}):
        found = chi_square({**COUNTS, "d": 1}, distribution, 1e-3)
        assert (found.p_value, found.worst) == (0.0, "d")
    assert chi_square({"a": 9}, {"a": 1.0}, 1e-3).p_value == 1.0


def test_rounding_of_the_distribution_is_not_held_against_the_counts():
    found = chi_square(COUNTS, DISTRIBUTION, 1e-3, tolerance=0.05)
    assert found.p_value == pytest.approx(stats.ncx2.sf(found.statistic, 2, 1000 * 0.05**2))
    assert found.p_value > chi_square(COUNTS, DISTRIBUTION, 1e-3).p_value
