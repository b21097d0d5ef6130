"""What a part of the report is made of: pictures, each with the table of the numbers in it, or why there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .look import DIM, Look, saved
from .results import Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        draw: makes the figure; to be called within the look's style.
    """

    name: str
    title: str
    says: str
    table: Table
    draw: Callable[[Look], Figure]

    def file(self, look: Look, form: str, machine: str = "") -> bytes:
        """A picture as a file ("svg" or "png").

        Args:
            machine: a line below the picture, where it stands alone.
        """
        with look.style():
            figure = self.draw(look)
            if look.alone:
                figure.suptitle(self.title, x=0.01, ha="left", fontsize=10, fontweight="bold")
                figure.supxlabel(machine, x=0.01, ha="left", fontsize=7, color=DIM)
            return saved(figure, form)


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


# ---- Numbers, as the whole report writes them


def number(value: float | None) -> str:
    """Three digits, never an exponent; what is not known is a dash."""
    if value is None:
        return "–"
    return (
        f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}".rstrip(".") if abs(value) >= 5e-4 else f"{value:g}"
    )


def spread(of: Spread | None) -> str:
    """The median, and the quartiles in brackets."""
    return "–" if of is None else f"{number(of.median)} ({number(of.low)} to {number(of.high)})"


def decimals(value: float | None) -> str:
    """Two, as alpha and tau have."""
    return "–" if value is None else f"{value:.2f}"


def percent(part: float | None) -> str:
    return "–" if part is None else f"{100 * part:.0f} %"


def milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{number(1e3 * seconds)} ms"
