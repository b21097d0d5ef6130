"""A table where there is room for one, else its cells as text, so that no number and no word is broken."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .terminal import visible

UNLIMITED = 10_000  # columns of what is no terminal, whose lines are never broken


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], err: bool = False) -> None:
    """Prints to stdout, or with ``err`` to stderr. A terminal that is too narrow gets a paragraph for each row, with
    the names of the columns before the cells; what is no terminal gets the table.

    Args:
        columns: their names, which may have two lines.
        rows: of as many cells each.
    """
    console = Console(stderr=err, highlight=False)
    table = Table(*columns, box=box.SIMPLE, padding=0)
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    wide = console.options.update(max_width=UNLIMITED, width=UNLIMITED)
    width = Measurement.get(console, wide, table).maximum
    if not console.is_terminal or width <= console.width:
        Console(stderr=err, width=width).print(table)
        return
    for row in rows:
        cells = [f"{name.replace(chr(10), ' ')} {cell}" for name, cell in zip(columns, row, strict=True)]
        console.print(Text(visible(", ".join(cells))))
