"""Fits y = b x^n, or where a floor is plain y = a + b x^n, to measured times."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import optimize, stats

PLAIN = 4.0  # a floor is plain if it makes the sum of squares so many times smaller,
LEAST = 0.05  # and is at least this part of the smallest time


def fit(x: Sequence[float], y: Sequence[float]) -> dict[str, float | list[float] | None]:
    """Least squares of log y, so that every point counts by its relative error.

    Args:
        x, y: > 0; three points or more.

    Returns:
        ``exponent`` n, ``interval`` of 95 % of it (None if there are no more points than numbers), ``factor`` b,
        ``floor`` a (0 where none is plain) and ``error``, the root mean square of log y's.
    """
    u, v = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    n, log_b = np.polyfit(u, v, 1)
    straight, power = _least(lambda p: p[0] + p[1] * u - v, [log_b, n])
    if len(x) > 4:
        start = [math.log(0.5 * min(y)), v[-1] - u[-1], 1.0]
        curved, floored = _least(lambda p: np.logaddexp(p[0], p[1] + p[2] * u) - v, start)
        floor = math.exp(curved[0])
        if np.sum(floored.fun**2) * PLAIN < np.sum(power.fun**2) and floor > LEAST * min(y):
            return _result(curved[2], curved[1], floor, floored, 2)
    return _result(straight[1], straight[0], 0.0, power, 1)


def _least(residuals, start: Sequence[float]) -> tuple[np.ndarray, optimize.OptimizeResult]:
    found = optimize.least_squares(residuals, start)
    return found.x, found


def _result(
    exponent: float, log_factor: float, floor: float, found: optimize.OptimizeResult, place: int
) -> dict[str, float | list[float] | None]:
    """``place``: of the exponent among the fitted numbers."""
    points, numbers = found.jac.shape
    interval, free = None, points - numbers
    if free > 0:
        covariance = np.linalg.pinv(found.jac.T @ found.jac) * np.sum(found.fun**2) / free
        half = stats.t.ppf(0.975, free) * math.sqrt(covariance[place, place])
        interval = [float(exponent - half), float(exponent + half)]
    return {
        "exponent": float(exponent),
        "interval": interval,
        "factor": math.exp(log_factor),
        "floor": floor,
        "error": math.sqrt(np.mean(found.fun**2)),
    }
