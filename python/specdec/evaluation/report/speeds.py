"""Tokens a second by method: bars with quartiles, sorted, beside the two baselines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .plot import BLUE, DASHES, DIM, FAINT, INK, SKY, Plot, Section, Table, number, spread
from .results import ASSISTED, PLAIN, TRANSFORMERS, BenchResults, CellResult, Series, Setting, SettingVerdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HATCHES = {PLAIN: "///", TRANSFORMERS: "xxx"}  # of the baselines; what is compared with them has none
FILLS = {PLAIN: ("none", DIM), TRANSFORMERS: ("none", DIM), ASSISTED: (FAINT, DIM)}  # of what is not our speculation
BAR_HEIGHT = 0.52  # of 1, the distance of two bars


def speeds(results: BenchResults) -> Section:
    """A picture for each setting."""
    plots, left_out = [], []
    verdicts = {verdict.setting: verdict for verdict in results.verdicts}
    for setting, cells in results.by_setting().items():
        if shown := fastest_of_each(cells):
            plots.append(_plot(setting, shown, verdicts.get(setting)))
        else:
            left_out.append(f"No tokens a second ({setting.words}): no cell has a speed.")
    if not results.cells:
        left_out.append("No tokens a second: the results have no cells.")
    about = (
        "The bar is the median of the rounds, the thin line goes from quartile to quartile, and the dashed lines are "
        "the two baselines. Grey is transformers' assisted generation. Of each method and rule, it is the K that was "
        "fastest here."
    )
    return Section("Tokens a second", about, tuple(plots), tuple(left_out))


def fastest_of_each(cells: Sequence[CellResult]) -> list[CellResult]:
    """Of every series the cell with the highest median, the fastest first. Cells without a speed are left out."""
    ordered = sorted((cell for cell in cells if cell.speed), key=_median, reverse=True)
    best: dict[Series, CellResult] = {}
    for cell in ordered:
        best.setdefault(cell.series, cell)
    return list(best.values())


def _median(cell: CellResult) -> float:
    return cell.speed.median if cell.speed else 0.0


def _plot(setting: Setting, cells: list[CellResult], verdict: SettingVerdict | None) -> Plot:
    rows = tuple(
        (c.name, spread(c.speed), spread(c.over_plain), spread(c.over_transformers), _standing(c, verdict))
        for c in cells
    )
    head = ("method", "tokens/s (quartiles)", "times plain", "times transformers", "")
    first = cells[0]
    says = f"{first.name} is at the top with {number(_median(first))} tokens/s"
    says += "".join(f"; {c.name} has {number(_median(c))}" for c in cells[1:] if c.is_baseline)

    def draw(figure: Figure) -> None:
        _draw(figure, cells, verdict)

    title, height = f"Tokens a second: {setting.words}", 0.9 + 0.34 * len(cells)
    return Plot(f"speed-{setting.file_name}", title, f"{says}.", Table(head, rows), height, draw)


def _standing(cell: CellResult, verdict: SettingVerdict | None) -> str:
    if verdict is None:
        return ""
    if cell.id == verdict.winner:
        return "fastest"
    return "within noise" if cell.id in verdict.within_noise else ""


def _draw(figure: Figure, cells: list[CellResult], verdict: SettingVerdict | None) -> None:
    axes = figure.add_subplot()
    widest = max(c.speed.high for c in cells if c.speed)
    for i, cell in enumerate(cells):
        assert cell.speed is not None
        median, low, high = cell.speed
        fill, edge = FILLS.get(cell.series.method, (SKY, BLUE))
        hatch = HATCHES.get(cell.series.method)
        axes.barh(i, median, BAR_HEIGHT, color=fill, edgecolor=edge, hatch=hatch, label=cell.name)
        quartiles = [[median - low], [high - median]]
        axes.errorbar(median, i, xerr=quartiles, color=INK, capsize=3, elinewidth=1.2, label="_quartiles")
    for cell in (c for c in cells if c.is_baseline):
        above, below = ([i + side for i in range(len(cells))] for side in (-0.5, 0.5))
        at = [_median(cell)] * len(cells)
        axes.vlines(at, above, below, color=DIM, linewidth=1, linestyle=DASHES, zorder=3, label="_baseline")
    axes.set_ylim(len(cells) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(range(len(cells)), [c.name for c in cells])
    across = axes.get_yaxis_transform()  # x in parts of the width, y as the bars have it
    for i, cell in enumerate(cells):
        axes.text(1.01, i, _words(cell, verdict), transform=across, va="center")
    axes.set_xlim(0, widest * 1.02)
    axes.set_xlabel("tokens/s")


def _words(cell: CellResult, verdict: SettingVerdict | None) -> str:
    """The number beside a bar."""
    words = number(_median(cell))
    if cell.over_plain and cell.series.method != PLAIN:
        words += f" ({number(cell.over_plain.median)}×)"
    return f"{words} {_standing(cell, verdict)}".rstrip()
