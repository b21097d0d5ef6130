"""Which way of decoding is the fastest, where that can be told from noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from .grid import PLAIN, TRANSFORMERS, BenchCell, Setting

LEVEL = 0.95  # of an interval, where there are rounds enough
FEWEST = 5  # rounds from which a winner is named
# By so much one process can differ from the next one in all of its rounds, since its memory lies elsewhere. What is
# closer than that is called noise, however often it is measured in one process.
SAME = 0.02


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns an interval that has the median with a probability of LEVEL at least, whatever the distribution: that of
    the sign test, from one order statistic to its mirror image. (Conover, Practical Nonparametric Statistics, 3.2.)

    Fewer than 6 values cannot say it with that probability: then it is from the smallest to the largest one, which has
    the median with 1 - 2^(1 - n), so 94 % for five.
    """
    ordered, n = sorted(values), len(values)
    below, cut = 0.0, 0
    while cut < n // 2:
        below += math.comb(n, cut) / 2**n  # P(at most ``cut`` of n values lie below the median)
        if 2 * below > 1 - LEVEL:
            break
        cut += 1
    cut = max(cut - 1, 0)
    return ordered[cut], ordered[n - 1 - cut]


def ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Round by round: what the machine does besides slows both in the same round."""
    return [a / b for a, b in zip(first, second, strict=True)]


def summary(values: Sequence[float]) -> dict:
    """Median, quartiles and interval, for JSON."""
    return {"median": statistics.median(values), "quartiles": quartiles(values), "interval": list(interval(values))}


def tail(values: Sequence[float]) -> dict | None:
    """Median and the 99th percentile, for JSON; None: there is no value."""
    if not values:
        return None
    return {"median": statistics.median(values), "p99": sorted(values)[math.ceil(0.99 * len(values)) - 1]}


def quartiles(values: Sequence[float]) -> list[float]:
    if len(values) == 1:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def verdict(setting: Setting, cells: Sequence[BenchCell], speeds: Mapping[str, Sequence[float]]) -> dict:
    """Names the fastest cell of a setting if it is faster than every other one: if the interval of the ratio of their
    speeds, round by round, lies above 1 + SAME. Otherwise it names all that cannot be told from the fastest.

    Args:
        cells: of the setting, those with rounds.
        speeds: tokens per second in each round, by the cell's id.
    """
    names = [cell.id for cell in cells]
    best = max(names, key=lambda name: statistics.median(speeds[name]))
    rounds = len(speeds[best])
    close = [n for n in names if n != best and interval(ratios(speeds[best], speeds[n]))[0] <= 1 + SAME]
    if rounds < FEWEST:
        close = [n for n in names if n != best]
    labels = {cell.id: _label(cell) for cell in cells}
    whole = {"temperature": setting.temperature, "batch": setting.batch, **setting.filters}
    words = _words(setting, best, close, labels, rounds, _gains(cells, best, speeds))
    return {**whole, "winner": None if close else best, "within_noise": [best, *close] if close else [], "words": words}


def _gains(cells: Sequence[BenchCell], best: str, speeds: Mapping[str, Sequence[float]]) -> list[str]:
    found = []
    for cell in cells:
        if cell.method in (PLAIN, TRANSFORMERS) and cell.id != best:
            values = ratios(speeds[best], speeds[cell.id])
            low, high = interval(values)
            name = "plain decoding" if cell.method == PLAIN else "transformers' generate"
            found.append(f"{statistics.median(values):.2f} times {name} ({low:.2f} to {high:.2f})")
    return found


def _words(
    setting: Setting, best: str, close: Sequence[str], labels: Mapping[str, str], rounds: int, gains: Sequence[str]
) -> str:
    where, faster = setting.words, " and ".join(gains)
    if rounds < FEWEST:
        return f"{where}: {rounds} rounds are too few to name the fastest, {FEWEST} are enough"
    if not close:
        plain_wins = "; drafts do not pay here" if labels[best] in BASELINE_LABELS else ""
        return f"{where}: {labels[best]} is the fastest, {faster}{plain_wins}"
    same = [labels[name] for name in (best, *close)]
    plain = [label for label in same if label in BASELINE_LABELS]
    if plain == same:
        told = "; drafts do not pay here"
    elif plain:
        told = "; whether drafts pay cannot be told"
    else:
        told = f"; {faster}"
    return f"{where}: within noise: {', '.join(same)}{told}"


BASELINE_LABELS = ("plain decoding", "transformers' generate")


def _label(cell: BenchCell) -> str:
    """The cell without its setting."""
    if cell.method == PLAIN:
        return BASELINE_LABELS[0]
    if cell.method == TRANSFORMERS:
        return BASELINE_LABELS[1]
    return cell.id.removesuffix(cell.setting.name).strip()
