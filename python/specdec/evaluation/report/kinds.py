"""Speed by kind of prompt, beside transformers' generate: what a mean over all prompts hides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..bench.verdicts import ratios, summary
from .plot import DASHES, DIM, Plot, Section, Table, marks, number, spread
from .results import TRANSFORMERS, BenchResults, CellResult, Quartiles, Series, Setting
from .speeds import fastest_of_each

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Lines = dict[CellResult, dict[str, Quartiles]]  # of each cell, times transformers by kind


def kinds(results: BenchResults) -> Section:
    """A picture for each setting whose prompts are of two kinds or more."""
    plots, left_out, numbers = [], [], {series: i for i, series in enumerate(results.series)}
    for setting, cells in results.by_setting().items():
        if lines := lines_of(cells):
            plots.append(_plot(setting, lines, numbers))
        else:
            why = "no speeds of two kinds of prompts, one at a time"
            left_out.append(f"No speeds by kind of prompt ({setting.words}): {why}.")
    about = (
        "Times as fast as transformers' generate on the same prompts, round by round: medians and quartiles. Of each "
        "method and rule, it is the K that was fastest over all prompts. A text that repeats its prompt, or itself, "
        "can be drafted from; where others lose, a mean over all kinds would hide it."
    )
    return Section("Speed by kind of prompt", about, tuple(plots), tuple(left_out))


def lines_of(cells: Sequence[CellResult]) -> Lines:
    """Of every series but transformers' generate its fastest cell; {} where there are no two kinds to compare."""
    peer = next((c for c in cells if c.series.method == TRANSFORMERS), None)
    if peer is None or len(peer.by_kind) < 2:
        return {}
    alike = [c for c in fastest_of_each(cells) if c is not peer and c.by_kind.keys() == peer.by_kind.keys()]
    return {c: {kind: over(c.by_kind[kind], speeds) for kind, speeds in peer.by_kind.items()} for c in alike}


def over(speeds: Sequence[float], of_peer: Sequence[float]) -> Quartiles:
    """The ratio, round by round."""
    found = summary(ratios(speeds, of_peer))
    return Quartiles(found["median"], *found["quartiles"])


def _plot(setting: Setting, lines: Lines, numbers: dict[Series, int]) -> Plot:
    names = list(next(iter(lines.values())))
    rows = tuple((kind, *(spread(of_kind[kind]) for of_kind in lines.values())) for kind in names)
    table = Table(("times transformers (quartiles)", *(cell.name for cell in lines)), rows)
    best = {kind: max(lines, key=lambda cell: lines[cell][kind].median) for kind in names}
    said = (f"{kind} {number(lines[cell][kind].median)}, {cell.series.name}" for kind, cell in best.items())
    says = f"The fastest of each kind, times transformers' generate: {'; '.join(said)}."

    def draw(figure: Figure) -> None:
        _draw(figure, lines, names, numbers)

    height = 1.0 + 0.09 * len(names) * (len(lines) + 1)
    return Plot(f"kinds-{setting.file_name}", f"Speed by kind of prompt: {setting.words}", says, table, height, draw)


def _draw(figure: Figure, lines: Lines, names: Sequence[str], numbers: dict[Series, int]) -> None:
    axes = figure.add_subplot()
    axes.axvline(1, color=DIM, linewidth=1, linestyle=DASHES, label="_transformers")
    apart = 0.7 / len(lines)  # of 1, the distance of two kinds
    for i, (cell, of_kind) in enumerate(lines.items()):
        found = [of_kind[kind] for kind in names]
        places = [at + (i - (len(lines) - 1) / 2) * apart for at in range(len(names))]
        errors = [[s.median - s.low for s in found], [s.high - s.median for s in found]]
        colour, marker = (DIM, "|") if cell.is_baseline else marks(numbers[cell.series])
        axes.errorbar(
            [s.median for s in found], places, xerr=errors, color=colour, marker=marker, linestyle="none",
            capsize=2.5, elinewidth=1.2, label=cell.name,
        )  # fmt: skip
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("times transformers generate")
    axes.grid(axis="x")
    figure.legend(loc="outside lower center", ncols=2)
