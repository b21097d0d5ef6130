"""What is different where output goes to a terminal: control characters are shown, remarks are wrapped at words,
and a table that is too wide becomes text, so that no number is broken."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

# C0 but line feed and tab, DEL, C1, and what changes the direction of text (embeddings, overrides, isolates): a model
# that writes them could move the cursor, rename the window, or show code in another order than it is in.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def on_terminal() -> bool:
    """Whether stdout is one."""
    return sys.stdout.isatty()


def visible(text: str) -> str:
    """``text`` with escapes instead of control characters, which a terminal would obey: ``\\x1b``, ``\\u202e``.
    It may be a piece of a text, as characters are escaped one by one."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def write(text: str, colour: str | None = None, dim: bool = False) -> None:
    """Writes text of a model or a prompt to stdout, without a line end: as it is, or visibly to a terminal. Lines are
    not wrapped, so that what is copied from a terminal is the text."""
    if on_terminal():
        typer.echo(typer.style(visible(text), fg=colour, dim=dim) if colour or dim else visible(text), nl=False)
    else:
        typer.echo(text, nl=False, color=True)  # or click would take out escape sequences of the text itself


def remark(text: str | Text, style: str = "", err: bool = True) -> None:
    """Prints a line, on a terminal wrapped at words.

    Args:
        style: as rich has it, for terminals.
        err: whether it goes to stderr, else to stdout.
    """
    console = Console(stderr=err, highlight=False)
    line = Text(visible(text)) if isinstance(text, str) else text
    console.print(line, style=style, soft_wrap=not console.is_terminal)


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
