"""How pictures look: in light and dark, wide and narrow, told apart without colour, and the same bytes every time.

Colours are Okabe and Ito's ("Color Universal Design", 2008), which people with any kind of colour vision can tell
apart. In grey they are not enough, so every series also has a marker of its own, and every part of a bar a hatch."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILLION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"
INK, DIM, FAINT, GROUND = "#1b2026", "#56606b", "#d5dae0", "#ffffff"  # text, axes, grids, and what is below them
DARK = {  # what takes a colour's place on a dark page; all others stay as they are
    **{INK: "#e6eaef", DIM: "#a5afba", FAINT: "#2c343d", GROUND: "#171c23"},
    **{BLUE: SKY, SKY: BLUE, VERMILLION: ORANGE, ORANGE: VERMILLION},
}
LINES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, INK)
MARKERS = "osD^vPXp"  # eight, where there are seven colours: 56 pairs before one returns
DASHES = (0, (4, 2))  # of what is predicted
DOTS_PER_INCH = 200  # of PNG files


@dataclass(frozen=True)
class Look:
    """
    Attributes:
        narrow: for a page of 360 pixels, else of 720.
        alone: a file of its own, which has a ground, a title, and a line about the machine.
    """

    narrow: bool = False
    alone: bool = False

    @property
    def width(self) -> float:
        """Inches."""
        return 3.4 if self.narrow else 7.5

    @contextmanager
    def style(self) -> Iterator[None]:
        """matplotlib's own style with this look, in which figures are made and saved. What the user configured is as
        before afterwards."""
        import matplotlib.style

        settings: dict[str, Any] = {
            "font.size": 9,
            "text.parse_math": False,  # a name with dollars is no formula
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.edgecolor": DIM,
            "axes.labelcolor": INK,
            "axes.facecolor": "none",
            "grid.color": FAINT,
            "grid.linewidth": 0.8,
            "text.color": INK,
            "xtick.color": DIM,
            "ytick.color": DIM,
            "xtick.labelcolor": INK,
            "ytick.labelcolor": INK,
            "hatch.linewidth": 0.8,
            "lines.markersize": 5.5,
            "legend.frameon": False,
            "legend.fontsize": 8.5,
            "svg.hashsalt": "specdec",  # or the names of a file's parts would be random
            "savefig.facecolor": GROUND if self.alone else "none",
        }
        with matplotlib.style.context(["default", settings]):
            yield

    def figure(self, height: float) -> Figure:
        """An empty one, which is not registered anywhere.

        Args:
            height: inches.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(self.width, height), layout="constrained")
        FigureCanvasAgg(figure)
        return figure


def marks(number: int) -> tuple[str, str]:
    """The colour and the marker of a series: no two of 56 have the same pair."""
    return LINES[number % len(LINES)], MARKERS[number % len(MARKERS)]


def darkened(svg: bytes) -> bytes:
    """The picture for a dark page."""
    return re.sub(rb"#[0-9a-f]{6}", lambda colour: DARK.get(colour[0].decode(), colour[0].decode()).encode(), svg)


def saved(figure: Figure, form: str) -> bytes:
    """The file, "svg" or "png", without a date, so that equal results are equal bytes. To be called in ``style``."""
    file = io.BytesIO()
    if form == "svg":
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    else:
        figure.savefig(file, format=form, dpi=DOTS_PER_INCH, metadata={"Software": None})
    return file.getvalue()


BAR_HEIGHT = 0.52  # of 1, the distance of two bars


def label_bars(axes: Axes, names: list[str], values: list[str], look: Look) -> None:
    """Writes a name on the left of each horizontal bar and a value on its right; where there is no room for that, both
    above it. The first bar is on top."""
    axes.set_ylim(len(names) - 0.5, -0.75 if look.narrow else -0.5)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_yticks([] if look.narrow else range(len(names)), [] if look.narrow else names)
    across = axes.get_yaxis_transform()  # x in parts of the width, y as the bars have it
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        if look.narrow:
            above = i - BAR_HEIGHT / 2 - 0.04
            axes.text(0, above, name, transform=across, va="bottom", fontsize=8.5)
            axes.text(1, above, value, transform=across, va="bottom", ha="right", fontsize=8.5)
        else:
            axes.text(1.01, i, value, transform=across, va="center")


def height_of_bars(count: int, look: Look) -> float:
    """Inches for so many, with an axis."""
    return 0.9 + count * (0.44 if look.narrow else 0.34)
