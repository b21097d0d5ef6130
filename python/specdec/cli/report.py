"""``specdec report``: the pictures of a run of ``specdec bench``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from . import options
from .terminal import remark

FORMATS = "png,svg"


def report(
    results: Annotated[
        Path, typer.Argument(metavar="FOLDER|FILE", help="What `specdec bench` wrote: its folder, or results.json.")
    ],
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the report goes. Default: beside the results.")
    ] = None,
    formats: Annotated[
        str, typer.Option("--format", help="Of the pictures' files, separated by commas; none: only the page.")
    ] = FORMATS,
) -> None:
    """Writes report.html, a page that needs no other file and no network, and its pictures in plots/, from the results
    of `specdec bench`. Prints the names of the files. Needs matplotlib (pip install 'specdec[bench]')."""
    with options.user_errors():
        from ..evaluation.report import load_results

        content = load_results(results)
        folder = output or (results if results.is_dir() else results.parent)
        for path in write(content, folder, formats):
            typer.echo(path)


def write(results: Mapping[str, Any], folder: Path, formats: str = FORMATS) -> list[Path]:
    """Writes the report of results that are known already; a disk that is full ends the command with a message. To be
    called within ``options.user_errors``."""
    from ..evaluation.report import write_report

    named = [] if formats == "none" else [name.strip() for name in formats.split(",")]
    try:
        return write_report(results, folder, named)
    except OSError as error:
        remark(f"Error: the report cannot be written to {folder}: {error.strerror or error}", "red")
        raise typer.Exit(1) from error
