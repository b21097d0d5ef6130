"""HTML out of text, tables and pictures. Text only ever becomes text."""

from __future__ import annotations

import base64
import html
import re

from .fields import visible
from .look import Look, darkened
from .plot import Plot, Table

OPEN_ROWS = 12  # longer tables are closed until somebody opens them


def text(of: object) -> str:
    """Escaped, and visible, as on the server's page."""
    return "".join(f'<span class="escape">{visible(c)}</span>' if visible(c) != c else html.escape(c) for c in str(of))


def attribute(of: object) -> str:
    """The same inside quotes, where there are no elements."""
    return html.escape(visible(str(of)))


def name_of(title: str) -> str:
    """For ``id``."""
    return re.sub("[^a-z0-9]+", "-", title.lower()).strip("-")


def table(of: Table, caption: str) -> str:
    """A table with headings for screen readers, in a box of its own that scrolls where it is too wide."""
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in of.head)
    lines = []
    for first, *rest in of.rows:
        cells = "".join(f"<td>{text(cell)}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{text(first)}</th>{cells}</tr>')
    opened = " open" if len(of.rows) <= OPEN_ROWS else ""
    return (
        f"<details{opened}><summary>Numbers<span class=unseen>: {text(caption)}</span></summary>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{attribute(caption)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></details>"
    )


def picture(plot: Plot) -> str:
    """The picture for light and dark, wide and narrow pages, of which a browser shows one, and its table."""
    dark, narrow = "screen and (prefers-color-scheme: dark)", "(max-width: 45rem)"
    wide, slim = (plot.file(Look(narrow=is_narrow), "svg") for is_narrow in (False, True))
    sources = "".join(
        f'<source media="{media}" srcset="{_data(svg)}">'
        for media, svg in ((f"{dark} and {narrow}", darkened(slim)), (dark, darkened(wide)), (narrow, slim))
    )
    image = f'<img src="{_data(wide)}" alt="{attribute(plot.says)} The table has the numbers.">'
    caption = f"<figcaption><h3>{text(plot.title)}</h3><p>{text(plot.says)}</p></figcaption>"
    return f"<figure>{caption}<picture>{sources}{image}</picture>{table(plot.table, plot.title)}</figure>"


def _data(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
