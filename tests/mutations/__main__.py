"""``python -m tests.mutations [NAME ...] [--list] [-j N]``: which test kills each mutation. See CONTRIBUTING.md."""

from __future__ import annotations

import fnmatch
import queue
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import MUTATIONS
from .gate import Gate, Unmutated, Verdict
from .mutation import Mutation

console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Mutations, or patterns such as 'block*'. All of them.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Lists them and runs nothing.")] = False,
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=1, help="Copies that work at a time.")] = 1,
) -> None:
    """Applies each mutation to a copy of the repository and runs the everyday tests, the likely ones first."""
    chosen = [m for m in MUTATIONS if not names or any(fnmatch.fnmatch(m.name, name) for name in names)]
    if unknown := [name for name in names or [] if not fnmatch.filter([m.name for m in MUTATIONS], name)]:
        raise typer.BadParameter(f"NAME: got {unknown[0]!r}, allowed: names that --list shows, and patterns of them")
    if show:
        for mutation in chosen:
            console.print(f"[bold]{mutation.name}[/] {mutation.file}", highlight=False)
        return
    with tempfile.TemporaryDirectory(prefix="specdec-mutations-") as folder:
        verdicts = judge_all(chosen, Path(folder), jobs)
    report(verdicts)
    raise typer.Exit(not all(verdict.killed for verdict in verdicts))


def judge_all(chosen: list[Mutation], folder: Path, jobs: int) -> list[Verdict]:
    unmutated = Unmutated(folder / "unmutated")
    if (error := unmutated.build()) is not None:
        raise SystemExit(f"The repository does not build:\n{error}")
    gates: queue.Queue[Gate] = queue.Queue()
    for number in range(jobs):
        gates.put(Gate(folder / str(number), unmutated))

    def judge(mutation: Mutation) -> Verdict:
        gate = gates.get()
        try:
            verdict = gate.judge(mutation)
        finally:
            gates.put(gate)
        console.print(f"{mutation.name}: {verdict.text}\n{verdict.detail}".rstrip(), markup=False, highlight=False)
        return verdict

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(judge, chosen))


def report(verdicts: list[Verdict]) -> None:
    table = Table("mutation", "file", "")
    for verdict in verdicts:
        style = None if verdict.killed else "bold red"
        table.add_row(verdict.mutation.name, verdict.mutation.file, escape(verdict.text), style=style)
    console.print(table)
    killed = sum(verdict.killed for verdict in verdicts)
    console.print(f"{killed} of {len(verdicts)} killed")


if __name__ == "__main__":
    typer.run(main)
