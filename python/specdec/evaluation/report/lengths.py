"""Speed-up against K, measured, and predicted from alpha and c."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..theory import best_k, expected_speedup
from .plot import DASHES, DIM, Plot, Section, Table, decimals, marks, number, spread
from .results import BenchResults, CellResult, Quartiles, Series, Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Curve:
    """A series of one setting, which has a speed-up for two or more K."""

    series: Series
    number: int  # among all series of the results
    fixed: dict[int, CellResult]  # by K, in ascending order
    adaptive: CellResult | None

    @property
    def rates(self) -> tuple[float, float] | None:
        """alpha and c, the medians over K; None where one of them is not known."""
        alphas = [c.alpha for c in self.fixed.values() if c.alpha is not None]
        costs = [c.predicted_c for c in self.fixed.values() if c.predicted_c is not None]
        return (statistics.median(alphas), statistics.median(costs)) if alphas and costs else None

    @property
    def curve(self) -> list[tuple[int, float]]:
        """The speed-up that theorem 3.8 of Leviathan et al. predicts for every K up to the largest."""
        if self.rates is None:
            return []
        return [(k, expected_speedup(*self.rates, k)) for k in range(max(self.fixed) + 1)]


def lengths(results: BenchResults) -> Section:
    """A picture for each setting."""
    numbers = {series: i for i, series in enumerate(results.series)}
    plots, left_out = [], []
    for setting, cells in results.by_setting().items():
        if lines := lines_of(cells, numbers):
            plots.append(_plot(setting, lines))
            if not any(line.curve for line in lines):
                left_out.append(f"No predicted curve ({setting.words}): no method has both alpha and c.")
        else:
            left_out.append(
                f"No speed-up against K ({setting.words}): no method has a speed-up over plain decoding for two K."
            )
    about = (
        "Times as fast as plain decoding by specdec, round by round: medians and quartiles. Dashed curves are "
        "predicted from each method's alpha and c (Leviathan et al. 2023, theorem 3.8), with the medians of both over "
        "all K. They assume that drafts are accepted independently of each other, and that verifying K + 1 tokens "
        "takes the target no longer than one; where measured points fall below a curve, one of the two does not hold."
    )
    return Section("Speed-up against K", about, tuple(plots), tuple(left_out))


def lines_of(cells: list[CellResult], numbers: dict[Series, int]) -> list[Curve]:
    lines = []
    for series, i in numbers.items():
        known = [c for c in cells if c.series == series and c.over_plain]
        fixed = {c.k: c for c in known if isinstance(c.k, int)}
        if len(fixed) > 1:
            lines.append(Curve(series, i, dict(sorted(fixed.items())), next((c for c in known if c.k == "auto"), None)))
    return lines


def _plot(setting: Setting, lines: list[Curve]) -> Plot:
    rows = []
    for line in lines:
        predicted = dict(line.curve)
        for k, cell in line.fixed.items():
            measured = (decimals(cell.alpha), number(cell.predicted_c), spread(cell.over_plain))
            both = (number(cell.predicted_speedup), number(predicted.get(k)))
            rows.append((line.series.name, str(k), *measured, *both))
        if line.adaptive:
            measured = (decimals(line.adaptive.alpha), "–", spread(line.adaptive.over_plain))
            rows.append((line.series.name, "adapts", *measured, "–", "–"))
    head = ("method", "K", "alpha", "c", "times plain (quartiles)", "predicted for this K", "on the curve")

    def draw(figure: Figure) -> None:
        _draw(figure, lines)

    title = f"Speed-up against K: {setting.words}"
    says = " ".join(_best(line) for line in lines)
    return Plot(f"lengths-{setting.file_name}", title, says, Table(head, tuple(rows)), 3.4, draw)


def _best(line: Curve) -> str:
    """The K that was fastest, and the one that was predicted to be."""
    k = max(line.fixed, key=lambda k: _measured(line.fixed[k]).median)
    said = f"{line.series.name}: K = {k} is the fastest that was measured"
    if line.rates is not None:
        alpha, c = line.rates
        predicted = best_k(alpha, c, max(line.fixed))
        said += f", K = {predicted} the predicted one (alpha {alpha:.2f}, c {c:.2f})"
    return f"{said}."


def _measured(cell: CellResult) -> Quartiles:
    assert cell.over_plain is not None
    return cell.over_plain


def _draw(figure: Figure, lines: list[Curve]) -> None:
    axes = figure.add_subplot()
    largest = max(max(line.fixed) for line in lines)
    at_end = largest + max(1.0, largest / 5)  # where K adapts
    adaptive = any(line.adaptive for line in lines)
    axes.axhline(1, color=DIM, linewidth=1, label="_plain")
    for line in lines:
        colour, marker = marks(line.number)
        _points(axes, line, colour, marker, at_end)
        if line.curve:
            axes.plot(*zip(*line.curve, strict=True), color=colour, linestyle=DASHES, linewidth=1.2, label="_predicted")
    if any(line.curve for line in lines):
        axes.errorbar([], [], color=DIM, linestyle=DASHES, linewidth=1.2, label="predicted")
    ticks = [k for k in range(largest + 1) if largest <= 10 or k % 2 == 0]
    names = [str(k) for k in ticks]
    axes.set_xticks([*ticks, *([at_end] if adaptive else [])], [*names, *(["adapts"] if adaptive else [])])
    axes.set_xlabel("K, drafts a step")
    axes.set_ylabel("times plain decoding")
    axes.margins(y=0.08)
    axes.autoscale(axis="y")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    figure.legend(loc="outside right upper")  # where it covers no line


def _points(axes: Axes, line: Curve, colour: str, marker: str, place_of_adaptive: float) -> None:
    found: list[tuple[float, Quartiles]] = [(k, _measured(cell)) for k, cell in line.fixed.items()]
    groups: list[tuple[list[tuple[float, Quartiles]], str, str]] = [(found, "-", line.series.name)]
    if line.adaptive:
        groups.append(([(place_of_adaptive, _measured(line.adaptive))], "none", "_adapts"))
    for points, style, label in groups:
        errors = [[s.median - s.low for _, s in points], [s.high - s.median for _, s in points]]
        x, y = [k for k, _ in points], [s.median for _, s in points]
        axes.errorbar(
            x, y, yerr=errors, color=colour, marker=marker, linestyle=style, linewidth=1.6, capsize=2.5, label=label
        )
