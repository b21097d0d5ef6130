"""Runs the command lines of bench/ in the tests' process."""

from __future__ import annotations

import typer
from typer.testing import CliRunner


def run_main(benchmark, *arguments: str):
    """Runs a benchmark's command line in this process."""
    app = typer.Typer()
    app.command()(benchmark.main)
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
