"""``python -m tests.nightly [NAME ...] [--list] [--minutes N] [-j N] [--again]``: see CONTRIBUTING.md."""

from __future__ import annotations

import fnmatch
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import record
from .parts import ROOT, Part, parts
from .run import Ended, run

OUTPUT = ROOT / "build" / "nightly"  # what each part said
console = Console(soft_wrap=True, highlight=False)


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Parts, or patterns such as 'kernels/*'. All of them.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Says what is known of them, and runs nothing.")] = False,
    minutes: Annotated[float, typer.Option(min=0, help="No part begins later; 0: no limit.")] = 0,
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=1, help="Parts that run at a time.")] = 1,
    again: Annotated[bool, typer.Option("--again", help="Runs also what passed and has not changed since.")] = False,
) -> None:
    """Runs the parts that are missing, failed, or were judged by another source than the present one."""
    everything, known = parts(), record.read()
    chosen = [p for p in everything if not names or any(fnmatch.fnmatch(p.name, name) for name in names)]
    if unknown := [name for name in names or [] if not fnmatch.filter([p.name for p in everything], name)]:
        raise typer.BadParameter(f"NAME: got {unknown[0]!r}, allowed: names that --list shows, and patterns of them")
    states = {part.name: record.state(part, known.get(part.name)) for part in chosen}
    if show:
        report(chosen, known, states)
        return
    wanted = [part for part in chosen if again or states[part.name] != record.PASSED]
    late = time.monotonic() + 60 * minutes if minutes else float("inf")
    writing = threading.Lock()

    def judge(part: Part) -> bool:
        if time.monotonic() > late:
            console.print(f"{part.name}: no time left")
            return False
        output = OUTPUT / f"{part.name.replace('/', '-')}.txt"
        try:
            result = run(part, output)
        except Ended as error:
            console.print(f"{error}: {output}", markup=False)
            return False
        with writing:
            record.write(part.name, result)
            console.print(f"{part.name}: {in_words(result)}")
            if result["outcome"] != "passed":
                console.print(f"  {', '.join(result['failures'])}\n  all that it said: {output}", markup=False)
        return result["outcome"] == "passed"

    with ThreadPoolExecutor(jobs) as pool:
        try:
            passed = all(list(pool.map(judge, wanted)))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    raise typer.Exit(not passed)


def in_words(result: dict) -> str:
    counts = ", ".join(f"{result.get(name, 0)} {name}" for name in ("passed", "failed", "skipped"))
    return f"{result['outcome']}; {counts}; {result['cpu_seconds']} s of CPU in {result['seconds']} s"


def report(chosen: list[Part], known: dict[str, dict], states: dict[str, str]) -> None:
    table = Table("part", "", "result", "commit", "date")
    for part in chosen:
        result = known.get(part.name)
        style = None if states[part.name] == record.PASSED else "bold red"
        row = (in_words(result), result["commit"][:9], result["date"]) if result else ("", "", "")
        table.add_row(part.name, states[part.name], *row, style=style)
    console.print(table)
    console.print(", ".join(f"{list(states.values()).count(s)} {s}" for s in sorted({*states.values()})))


if __name__ == "__main__":
    typer.run(main)
