"""Acceptance by position: of steps that drafted so many, how many had their first, second, ... draft accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .look import DASHES, DIM, Look, marks
from .plot import Plot, Section, Table, decimals, percent
from .results import Cell, Results, Series, Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def acceptance(results: Results) -> Section:
    """A picture for each setting, in which each method has the largest K that it was measured with."""
    numbers = {series: i for i, series in enumerate(results.series)}
    plots, left_out = [], []
    for setting, cells in results.by_setting().items():
        longest: dict[Series, Cell] = {}
        for cell in (c for c in cells if c.by_position):
            if cell.series not in longest or _length(cell) > _length(longest[cell.series]):
                longest[cell.series] = cell
        if longest:
            plots.append(_plot(setting, list(longest.values()), numbers))
        else:
            left_out.append(f"No acceptance by position ({setting.words}): no method counted it.")
    about = (
        "Of the steps that drafted so many tokens, how many accepted this one and with it all before it, for the "
        "largest K of each method. Dashed: what alpha alone predicts, alpha to the power of the position. A line above "
        "its dashes means that what follows an accepted draft is easier than what comes first. Where K adapts, many "
        "drafts are made where many are likely to be accepted, so its later positions look better than those of a "
        "fixed K."
    )
    return Section("Acceptance by position", about, tuple(plots), tuple(left_out))


def _length(cell: Cell) -> tuple[bool, int]:
    """A fixed K says more than one that adapts: every step has all positions."""
    return cell.k != "auto", len(cell.by_position)


def _plot(setting: Setting, cells: list[Cell], numbers: dict[Series, int]) -> Plot:
    most = max(len(c.by_position) for c in cells)
    rows = []
    for cell in cells:
        shares = [percent(part) for part in cell.by_position] + [""] * (most - len(cell.by_position))
        rows.append((cell.name, decimals(cell.alpha), *shares))
    head = ("method", "alpha", *(f"draft {i}" for i in range(1, most + 1)))
    ends = (
        f"{c.name}: {percent(c.by_position[0])} of the first drafts, {percent(c.by_position[-1])} of the last"
        for c in cells
    )

    def draw(look: Look) -> Figure:
        return _draw(cells, numbers, most, look)

    title = f"Acceptance by position: {setting.words}"
    return Plot(f"acceptance-{setting.file_name}", title, f"{'; '.join(ends)}.", Table(head, tuple(rows)), draw)


def _draw(cells: list[Cell], numbers: dict[Series, int], most: int, look: Look) -> Figure:
    figure = look.figure(3.0 + 0.2 * len(cells) * look.narrow)
    axes = figure.add_subplot()
    for cell in cells:
        colour, marker = marks(numbers[cell.series])
        positions = range(1, len(cell.by_position) + 1)
        axes.plot(
            positions, [100 * p for p in cell.by_position], color=colour, marker=marker, linewidth=1.6, label=cell.name
        )
        if cell.alpha is not None:
            alone = [100 * cell.alpha**i for i in positions]
            axes.plot(positions, alone, color=colour, linestyle=DASHES, linewidth=1, label="_alpha")
    axes.plot([], [], color=DIM, linestyle=DASHES, linewidth=1, label="predicted by alpha")
    axes.set_xticks(range(1, most + 1))
    axes.set_xlabel("position of the draft in its step")
    axes.set_ylabel("% of the steps")
    axes.set_ylim(0, 100)
    axes.grid(axis="y")
    figure.legend(loc="outside lower left" if look.narrow else "outside right upper")
    return figure
