"""``specdec report``: the pictures of a run of ``specdec bench``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from .option_groups import command, option
from .terminal import remark

FORMATS = "png,svg"


@dataclass(frozen=True)
class ReportOptions:
    """The report"""

    output: Path | None = option(None, "Where the report goes. Default: beside the results.", metavar="FOLDER")
    formats: str = option(FORMATS, "Of the pictures' files, separated by commas; none: only the page.", "--format")


@command
def report(
    asked: ReportOptions,
    results: Annotated[
        Path, typer.Argument(metavar="FOLDER|FILE", help="What `specdec bench` wrote: its folder, or results.json.")
    ],
) -> None:
    """Writes report.html, a page that needs no other file and no network, and its pictures in plots/, from the results
    of `specdec bench`. Prints the names of the files. Needs matplotlib (pip install 'specdec-kernels[bench]')."""
    from ..evaluation.report import load_results

    content = load_results(results)
    folder = asked.output or (results if results.is_dir() else results.parent)
    for path in write(content, folder, asked.formats):
        typer.echo(path)


def write(results: Mapping[str, Any], folder: Path, formats: str = FORMATS) -> list[Path]:
    """Writes the report of results that are known already; a disk that is full ends the command with a message."""
    from ..evaluation.report import write_report

    named = [] if formats == "none" else [name.strip() for name in formats.split(",")]
    try:
        return write_report(results, folder, named)
    except OSError as error:
        remark(f"Error: the report cannot be written to {folder}: {error.strerror or error}", "red")
        raise typer.Exit(1) from error
