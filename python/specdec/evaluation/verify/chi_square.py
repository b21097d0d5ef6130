"""Pearson's chi-square test of counted outcomes against a distribution, and the bias that it finds."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ...checks import refuse

K = TypeVar("K", bound=Hashable)  # an outcome


class ChiSquare(NamedTuple, Generic[K]):
    statistic: float
    degrees: int
    p_value: float  # 0 where an outcome was drawn whose probability is 0
    detectable: float  # the relative bias found with power 0.999 at the test's level; see detectable_bias
    worst: K | None  # the outcome that adds most to the statistic; None where that is the rare ones together
    variation: float = 0.0  # the total variation between counts and distribution, over what was tested
    by_chance: float = 0.0  # how large that is on average where the distribution is right


def check_scipy() -> None:
    """Raises ValueError, which says how to install it, where scipy is missing. Nothing else in specdec needs it."""
    if importlib.util.find_spec("scipy") is None:
        installed = "it after pip install 'specdec-kernels[verify]'"
        refuse("checks", "'distribution' without scipy", f"{installed}, or other checks")


def chi_square(
    counts: Mapping[K, int],
    distribution: Mapping[K, float],
    level: float,
    least: float = 25.0,
    tolerance: float = 0.0,
    totals: int = 1,
) -> ChiSquare[K]:
    """Pearson's test of ``counts`` against ``distribution``.

    A distribution of one outcome has no degrees of freedom: its p-value is 1 unless something else was drawn.

    Args:
        counts: outcome -> how often it was drawn.
        distribution: outcome -> its probability. Outcomes that are missing have probability 0.
        level: the probability of a false alarm for which ``detectable`` is computed.
        least: outcomes expected fewer than this many times count as one.
        tolerance: the relative error (root mean square) of the distribution's own probabilities, as rounding makes it.
            What it may add to the statistic is not held against the counts.
        totals: into how many groups the outcomes fall whose counts the distribution was given. None may be rare.
    """
    draws = sum(counts.values())
    cells: dict[K | None, tuple[float, float]] = {}  # outcome -> observed, expected
    rare_observed = rare_expected = 0.0
    for outcome, p in distribution.items():
        if draws * p >= least:
            cells[outcome] = (counts.get(outcome, 0), draws * p)
        else:
            rare_observed += counts.get(outcome, 0)
            rare_expected += draws * p
    if rare_expected >= max(least, 1e-9):
        cells[None] = (rare_observed, rare_expected)
    degrees = max(len(cells) - totals, 0)
    error = draws * tolerance**2
    detectable = detectable_bias(draws, degrees, level, noncentrality=error) if degrees else np.inf
    impossible = [k for k, n in counts.items() if n and distribution.get(k, 0.0) == 0]
    if impossible:
        return ChiSquare(np.inf, degrees, 0.0, detectable, impossible[0])
    if not degrees:
        return ChiSquare(0.0, 0, 1.0, detectable, None)
    observed, expected = np.array(list(cells.values()), dtype=np.float64).T
    terms = (observed - expected) ** 2 / expected
    statistic, worst = float(terms.sum()), list(cells)[int(terms.argmax())]
    variation = float(np.abs(observed - expected).sum() / draws / 2)
    by_chance = float(np.sqrt(2 / np.pi * expected * (1 - expected / draws)).sum() / draws / 2)
    p_value = chi_square_tail(statistic, degrees, error)
    return ChiSquare(statistic, degrees, p_value, detectable, worst, variation, by_chance)


def chi_square_tail(statistic: float, degrees: int, noncentrality: float = 0.0) -> float:
    """P(X >= statistic) of the (noncentral) chi-square distribution."""
    from scipy import stats

    if noncentrality == 0:
        return float(stats.chi2.sf(statistic, degrees))
    return float(stats.ncx2.sf(statistic, degrees, noncentrality))


@functools.cache
def detectable_bias(draws: int, degrees: int, level: float, power: float = 0.999, noncentrality: float = 0.0) -> float:
    """The smallest d <= 1 such that probabilities off by a factor 1 +- d each are found with this power; 1 where none
    is.

    Pearson's statistic is then noncentral chi-square with noncentrality draws * d^2. ``noncentrality``: what the
    distribution's own error may add to it, which the test allows for."""
    from scipy import stats

    distribution = stats.ncx2(degrees, noncentrality) if noncentrality else stats.chi2(degrees)
    threshold, low, high = distribution.isf(level), 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        found = chi_square_tail(threshold, degrees, draws * middle**2) >= power
        low, high = (low, middle) if found else (middle, high)
    return high
