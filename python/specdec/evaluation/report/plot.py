"""What a part of the report is made of: pictures, each with the table of the numbers in it, or why there is none.

Colours are Okabe and Ito's ("Color Universal Design", 2008), which people with any kind of colour vision can tell
apart. In grey they are not enough, so every series also has a marker of its own."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .results import Quartiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORANGE, SKY, GREEN = "#e69f00", "#56b4e9", "#009e73"
BLUE, VERMILLION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"
INK, DIM, FAINT, GROUND = "#1b2026", "#56606b", "#d5dae0", "#ffffff"  # text, axes, grids, and what is below them
LINES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, INK)
MARKERS = "osD^vPXp"  # eight, where there are seven colours: 56 pairs before one returns
DASHES = (0, (4, 2))  # of what is predicted
WIDTH = 7.5  # inches
DOTS_PER_INCH = 200  # of PNG files
STYLE: dict[str, Any] = {
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
    "savefig.facecolor": GROUND,
}


@dataclass(frozen=True)
class Table:
    """The first column names the row."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Plot:
    """
    Attributes:
        name: of its files.
        title: a line.
        says: what is to be seen, in a sentence or two: the text instead of the picture.
        table: the same numbers.
        height: of the picture, in inches.
        draw: draws on a figure; to be called within ``STYLE``.
    """

    name: str
    title: str
    says: str
    table: Table
    height: float
    draw: Callable[[Figure], None]

    def file(self, form: str, machine: str = "") -> bytes:
        """The picture as a file without a date, so that equal results are equal bytes. What the user configured of
        matplotlib has no say.

        Args:
            form: "svg" or "png".
            machine: a line below the picture.
        """
        import matplotlib.style
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        file = io.BytesIO()
        with matplotlib.style.context(["default", STYLE]):
            figure = Figure(figsize=(WIDTH, self.height), layout="constrained")
            FigureCanvasAgg(figure)
            self.draw(figure)
            figure.suptitle(self.title, x=0.01, ha="left", fontsize=10, fontweight="bold")
            figure.supxlabel(machine, x=0.01, ha="left", fontsize=7, color=DIM)
            if form == "svg":
                figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
            else:
                figure.savefig(file, format=form, dpi=DOTS_PER_INCH, metadata={"Software": None})
        return file.getvalue()


@dataclass(frozen=True)
class Section:
    """
    Attributes:
        about: how to read the pictures.
        left_out: sentences, each about a picture that there is not, and why.
    """

    title: str
    about: str
    plots: tuple[Plot, ...] = ()
    left_out: tuple[str, ...] = ()


def marks(number: int) -> tuple[str, str]:
    """The colour and the marker of a series: no two of 56 have the same pair."""
    return LINES[number % len(LINES)], MARKERS[number % len(MARKERS)]


# ---- Numbers, as the whole report writes them


def number(value: float | None) -> str:
    """Three digits, never an exponent; what is not known is a dash."""
    if value is None:
        return "–"
    return (
        f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}".rstrip(".") if abs(value) >= 5e-4 else f"{value:g}"
    )


def spread(of: Quartiles | None) -> str:
    """The median, and the quartiles in brackets."""
    return "–" if of is None else f"{number(of.median)} ({number(of.low)} to {number(of.high)})"


def decimals(value: float | None) -> str:
    """Two, as alpha and tau have."""
    return "–" if value is None else f"{value:.2f}"
