"""Tokens a second by method: bars with quartiles, sorted, beside the two baselines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .look import BAR_HEIGHT, BLUE, DASHES, DIM, FAINT, INK, SKY, Look, height_of_bars, label_bars
from .plot import Plot, Section, Table, number, spread
from .results import ASSISTED, PLAIN, TRANSFORMERS, Cell, Results, Series, Setting, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HATCHES = {PLAIN: "///", TRANSFORMERS: "xxx"}  # of the baselines; what is compared with them has none
FILLS = {PLAIN: ("none", DIM), TRANSFORMERS: ("none", DIM), ASSISTED: (FAINT, DIM)}  # of what is not our speculation


def speeds(results: Results) -> Section:
    """A picture for each setting."""
    plots, left_out = [], []
    verdicts = {verdict.setting: verdict for verdict in results.verdicts}
    for setting, cells in results.by_setting().items():
        shown = fastest_of_each(cells)
        if shown:
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


def fastest_of_each(cells: Sequence[Cell]) -> list[Cell]:
    """Of every series the cell with the highest median, the fastest first. Cells without a speed are left out."""
    best: dict[Series, Cell] = {}
    for cell in cells:
        known = best.get(cell.series)
        if cell.speed and (known is None or known.speed is None or cell.speed.median > known.speed.median):
            best[cell.series] = cell
    return sorted(best.values(), key=_median, reverse=True)


def _median(cell: Cell) -> float:
    return cell.speed.median if cell.speed else 0.0


def _plot(setting: Setting, cells: list[Cell], verdict: Verdict | None) -> Plot:
    rows = tuple(
        (c.name, spread(c.speed), spread(c.over_plain), spread(c.over_transformers), _standing(c, verdict) or "")
        for c in cells
    )
    head = ("method", "tokens/s (quartiles)", "times plain", "times transformers", "")
    first = cells[0]
    says = f"{first.name} is at the top with {number(_median(first))} tokens/s"
    says += "".join(f"; {c.name} has {number(_median(c))}" for c in cells[1:] if c.is_baseline)

    def draw(look: Look) -> Figure:
        return _draw(cells, verdict, look)

    title = f"Tokens a second: {setting.words}"
    return Plot(f"speed-{setting.file_name}", title, f"{says}.", Table(head, rows), draw)


def _standing(cell: Cell, verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    if cell.id == verdict.winner:
        return "fastest"
    return "within noise" if cell.id in verdict.within_noise else ""


def _draw(cells: list[Cell], verdict: Verdict | None, look: Look) -> Figure:
    figure = look.figure(height_of_bars(len(cells), look))
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
        half = BAR_HEIGHT / 2 if look.narrow else 0.5  # between the bars there are names, where it is narrow
        above, below = ([i + sign * half for i in range(len(cells))] for sign in (-1, 1))
        at = [_median(cell)] * len(cells)
        axes.vlines(at, above, below, color=DIM, linewidth=1, linestyle=DASHES, zorder=3, label="_baseline")
    label_bars(axes, [c.name for c in cells], [_words(c, verdict, look) for c in cells], look)
    axes.set_xlim(0, widest * 1.02)
    axes.set_xlabel("tokens/s")
    return figure


def _words(cell: Cell, verdict: Verdict | None, look: Look) -> str:
    """The number beside a bar."""
    words = number(_median(cell))
    if cell.over_plain and cell.series.method != PLAIN:
        words += f" ({number(cell.over_plain.median)}×)"
    standing = "" if look.narrow else _standing(cell, verdict)
    return f"{words} {standing}".rstrip()
