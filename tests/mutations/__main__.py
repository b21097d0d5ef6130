"""``python -m tests.mutations [NAME ...]``: which test kills each mutation. See CONTRIBUTING.md."""

from __future__ import annotations

import fnmatch
import queue
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import MUTATIONS
from .gate import Copy, Gate, Outcome, Unmutated, Verdict
from .mutation import Mutation
from .results import Results

console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Mutations, or patterns such as 'block*'. All of them.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Lists them and runs nothing.")] = False,
    stale: Annotated[bool, typer.Option("--stale", help="Lists those without a valid verdict in the record.")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Judges those without a valid verdict, and records each.")
    ] = False,
    everyday: Annotated[
        bool, typer.Option("--everyday", help="What its own tests do not kill meets the whole suite of every day.")
    ] = False,
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=1, help="Copies that work at a time.")] = 1,
) -> None:
    """Applies each mutation to a copy of the repository and runs the tests that are to kill it."""
    chosen = [m for m in MUTATIONS if not names or any(fnmatch.fnmatch(m.name, name) for name in names)]
    if unknown := [name for name in names or [] if not fnmatch.filter([m.name for m in MUTATIONS], name)]:
        raise typer.BadParameter(f"NAME: got {unknown[0]!r}, allowed: names that --list shows, and patterns of them")
    results = Results()
    if stale or record:
        chosen = results.stale(chosen)
    if show or stale:
        for mutation in chosen:
            console.print(f"[bold]{mutation.name}[/] {mutation.file}", highlight=False)
        return
    if record:
        results.begin(MUTATIONS)
    with tempfile.TemporaryDirectory(prefix="specdec-mutations-") as folder:
        verdicts = judge_all(chosen, Path(folder), jobs, everyday, results if record else None) if chosen else []
    report(verdicts)
    if record:
        console.print(results.line(), markup=False, highlight=False)
    raise typer.Exit(not all(verdict.killed for verdict in verdicts))


def judge_all(
    chosen: list[Mutation], folder: Path, jobs: int, everyday: bool, results: Results | None
) -> list[Verdict]:
    original = Copy(folder / "unmutated")
    if (error := original.build()) is not None:
        raise SystemExit(f"The repository does not build:\n{error}")
    unmutated = Unmutated(original)
    gates: queue.Queue[Gate] = queue.Queue()
    for number in range(jobs):
        gates.put(Gate(Copy(folder / str(number), original), unmutated, everyday))
    recording = threading.Lock()

    def judge(mutation: Mutation) -> Verdict:
        gate = gates.get()
        try:
            verdict = gate.judge(mutation)
        finally:
            gates.put(gate)
        with recording:
            if results is not None:
                results.add(verdict)
            console.print(f"{text(verdict)}\n{verdict.detail}".rstrip(), markup=False, highlight=False)
        return verdict

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(judge, chosen))


def text(verdict: Verdict) -> str:
    outcome = verdict.outcome if verdict.killed else verdict.outcome.upper()
    if verdict.test is not None:
        outcome += f", {verdict.test}"
    return f"{verdict.mutation.name}: {outcome} ({verdict.seconds:.0f} s, CPU {verdict.cpu_seconds:.0f} s)"


def report(verdicts: list[Verdict]) -> None:
    """The table of those that no test killed, and the number of the others."""
    table = Table("mutation", "file", "")
    for verdict in verdicts:
        if not verdict.killed:
            table.add_row(verdict.mutation.name, verdict.mutation.file, escape(verdict.outcome), style="bold red")
    if table.row_count:
        console.print(table)
    endless = sum(verdict.outcome == Outcome.ENDLESS for verdict in verdicts)
    killed = sum(verdict.killed for verdict in verdicts)
    console.print(f"{killed} of {len(verdicts)} killed, {endless} of them since their tests did not end")


if __name__ == "__main__":
    typer.run(main)
