"""Where the time of a step goes: drafting, the target's forward, the kernels that decide, and the loop around them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .look import BAR_HEIGHT, BLUE, DIM, GREEN, GROUND, ORANGE, Look, height_of_bars, label_bars
from .plot import Plot, Section, Table, decimals, milliseconds, percent
from .results import PARTS, Cell, Results, Setting
from .speeds import fastest_of_each

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORDS = {"draft": "draft", "target": "target", "kernels": "kernels", "loop": "loop"}
HATCHES = {"draft": "///", "target": "", "kernels": "|||", "loop": "xxx"}


def step_times(results: Results) -> Section:
    """A picture for each setting, with the fastest K of each method."""
    plots, left_out = [], []
    for setting, cells in results.by_setting().items():
        known = [c for c in fastest_of_each(cells) if c.shares and c.step_seconds is not None]
        if known:
            plots.append(_plot(setting, known))
        else:
            left_out.append(f"No time of a step ({setting.words}): no method measured the parts of its steps.")
    about = (
        "A step is one forward of the target with all that belongs to it. Its time is the time of an output token, "
        "times the tokens that a step emits. Kernels: drawing drafts, and deciding which of them stay; loop: all that "
        "is not a model or a kernel. transformers does not say where its time goes."
    )
    return Section("A step's time", about, tuple(plots), tuple(left_out))


def parts_of(cell: Cell) -> dict[str, float]:
    """Milliseconds of a step, by part."""
    assert cell.shares is not None and cell.step_seconds is not None
    return {part: 1e3 * cell.step_seconds * cell.shares[part] for part in PARTS}


def _plot(setting: Setting, cells: list[Cell]) -> Plot:
    cells = sorted(cells, key=lambda c: c.step_seconds or 0.0)
    rows = []
    for cell in cells:
        parts, shares = parts_of(cell), cell.shares or {}
        row = (f"{milliseconds(parts[part] / 1e3)} ({percent(shares[part])})" for part in PARTS)
        rows.append((cell.name, milliseconds(cell.step_seconds), decimals(cell.tau), *row))
    head = ("method", "a step", "tau", *WORDS.values())
    longest = cells[-1]
    heaviest = max(PARTS, key=lambda part: parts_of(longest)[part])
    says = (
        f"The longest step is that of {longest.name}, {milliseconds(longest.step_seconds)}, of which {WORDS[heaviest]} "
        f"takes {percent((longest.shares or {})[heaviest])}."
    )

    def draw(look: Look) -> Figure:
        return _draw(cells, look)

    title = f"A step's time: {setting.words}"
    return Plot(f"step-{setting.file_name}", title, says, Table(head, tuple(rows)), draw)


def _draw(cells: list[Cell], look: Look) -> Figure:
    figure = look.figure(height_of_bars(len(cells), look) + 0.3)
    axes = figure.add_subplot()
    colours = {"draft": ORANGE, "target": BLUE, "kernels": GREEN, "loop": DIM}
    lefts = [0.0] * len(cells)
    for part in PARTS:
        widths = [parts_of(cell)[part] for cell in cells]
        axes.barh(
            range(len(cells)),
            widths,
            BAR_HEIGHT,
            lefts,
            color=colours[part],
            edgecolor=GROUND,
            linewidth=0.6,
            hatch=HATCHES[part],
            label=WORDS[part],
        )
        lefts = [a + b for a, b in zip(lefts, widths, strict=True)]
    label_bars(axes, [c.name for c in cells], [milliseconds(c.step_seconds) for c in cells], look)
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds")
    above = {"bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
    axes.legend(loc="lower left", ncols=len(PARTS), handlelength=1.6, columnspacing=1.2, **above)
    return figure
