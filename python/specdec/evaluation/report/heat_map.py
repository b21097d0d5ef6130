"""Speed-up by K and temperature, a map for each method. Its numbers are written in it, so colour is an addition."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from .look import DIM, Look
from .plot import Plot, Section, Table, number
from .results import Cell, Results, Series, Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLACK, WHITE = "#000000", "#fefefe"  # of numbers on cells, which are the same on a dark page
Place = tuple[float, int | Literal["auto"]]  # temperature and K


def heat_maps(results: Results) -> Section:
    """A picture for each method, batch size and filter that has two K and two temperatures."""
    groups: dict[tuple[Series, Setting], dict[Place, Cell]] = {}
    known = [cell for cell in results.cells if cell.over_plain and cell.k is not None]
    for cell in known:
        groups.setdefault((cell.series, cell.setting._replace(temperature=0.0)), {})[_place(cell)] = cell
    for (series, setting), found in groups.items():  # greedy text has no filters, and belongs to the maps of all
        greedy = Setting(0.0, setting.batch, None, None, None)
        found |= {_place(c): c for c in known if (c.series, c.setting) == (series, greedy)}
    plots, names = [], list(dict.fromkeys(series for series, _ in groups))
    for (series, setting), found in groups.items():
        temperatures, lengths = (set(part) for part in zip(*found, strict=True))
        if len(temperatures) > 1 and len(lengths) > 1:
            plots.append(_plot(series, names.index(series) + 1, setting, found))
    left_out = () if plots else ("No map of K and temperature: no method was measured with two of both.",)
    about = (
        "Times as fast as plain decoding by specdec with the same settings. The largest number of each temperature has "
        "a frame; the brighter, the faster."
    )
    return Section("K and temperature", about, tuple(plots), left_out)


def _place(cell: Cell) -> Place:
    assert cell.k is not None
    return cell.setting.temperature, cell.k


def _plot(series: Series, number_of_series: int, setting: Setting, found: dict[Place, Cell]) -> Plot:
    temperatures = sorted({t for t, _ in found})
    lengths = sorted({k for _, k in found}, key=lambda k: (k == "auto", k))
    values = [[_speedup(found.get((t, k))) for k in lengths] for t in temperatures]
    names = [("adapts" if k == "auto" else str(k)) for k in lengths]
    rows = tuple((f"{t:g}", *map(number, row)) for t, row in zip(temperatures, values, strict=True))
    table = Table(("temperature", *(f"K = {n}" if n != "adapts" else f"K {n}" for n in names)), rows)
    most, where = max(
        (v, (t, k)) for t, row in zip(temperatures, values, strict=True) for k, v in zip(names, row, strict=True) if v
    )
    says = f"{series.name} is fastest at temperature {where[0]:g} with K {where[1]}: {number(most)} times plain."

    def draw(look: Look) -> Figure:
        return _draw(values, [f"{t:g}" for t in temperatures], names, look)

    parts = (str(part) for part in ("map", number_of_series, series.method, series.rule, series.tree) if part)
    name = re.sub("[^A-Za-z0-9]+", "-", " ".join(parts))  # a method may be a folder, whose name has slashes
    title = f"Times plain by K and temperature: {series.name}, {setting.words_but_temperature}"
    return Plot(f"{name}-{setting.file_name_but_temperature}", title, says, table, draw)


def _speedup(cell: Cell | None) -> float | None:
    return cell.over_plain.median if cell and cell.over_plain else None


def _draw(values: list[list[float | None]], temperatures: list[str], lengths: list[str], look: Look) -> Figure:
    import numpy as np
    from matplotlib.patches import Rectangle

    figure = look.figure(1.0 + 0.42 * len(temperatures))
    axes = figure.add_subplot()
    numbers = np.array([[np.nan if v is None else v for v in row] for row in values])
    image = axes.imshow(numbers, cmap="cividis", aspect="auto", vmin=min(1.0, np.nanmin(numbers)))
    colours = image.to_rgba(numbers)
    for i, row in enumerate(values):
        best = max((v for v in row if v is not None), default=None)
        for j, value in enumerate(row):
            ink = _readable_on(colours[i, j]) if value is not None else DIM
            weight = "bold" if value is not None and value == best else "normal"
            axes.text(j, i, number(value), ha="center", va="center", color=ink, fontweight=weight)
            if weight == "bold":
                frame = Rectangle((j - 0.46, i - 0.42), 0.92, 0.84, fill=False, edgecolor=ink, linewidth=1.4)
                axes.add_patch(frame)
    axes.set_xticks(range(len(lengths)), lengths)
    axes.set_yticks(range(len(temperatures)), temperatures)
    axes.set_xlabel("K, drafts a step")
    axes.set_ylabel("temperature")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    if not look.narrow:
        figure.colorbar(image, label="times plain")
    return figure


def _readable_on(colour: Sequence[float]) -> str:
    """Black or white, whichever has more contrast with red, green and blue from 0 to 1."""
    red, green, blue = colour[:3]
    return BLACK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.46 else WHITE
