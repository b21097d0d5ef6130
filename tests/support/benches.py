"""Command lines of bench/ in the tests' process."""

from __future__ import annotations

import typer
from typer.testing import CliRunner


def run_main(benchmark, *arguments: str):
    """The command line of a benchmark, in this process."""
    app = typer.Typer()
    app.command()(benchmark.main)
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
