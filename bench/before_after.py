"""Compares this checkout with another one: the same command runs in both, in turns.

    python bench/before_after.py OTHER bench/bench_load_aware.py --loads 1,4 --temperatures 0
    python bench/before_after.py OTHER --turns 5 -- -m specdec compare --json

The other checkout needs its native kernels built in place. Its benchmarks are its own: a race's JSON of either form is
understood, and so is that of ``specdec compare``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import report
import typer
from measure import ratios
from rich.console import Console
from rich.table import Table

BEFORE, AFTER = "before", "after"


def numbers_of(result: Mapping) -> Iterator[tuple[str, float]]:
    """(what it is, tokens a second by median), and of ``specdec compare`` the seconds that its loop takes."""
    for row in result.get("rows", ()):
        methods = row.get("methods") or (row.get("cell") or {}).get("methods", {})
        where = ", ".join(f"{name} {row[name]:g}" for name in ("temperature", "load", "rows") if name in row)
        for name, method in methods.items():
            yield f"{where}: {name}", method["tokens_per_second"]["median"]
    for method in result.get("methods", ()):
        yield method["name"], method["tokens_per_second"]
        if method.get("loop_fraction") is not None:
            yield f"{method['name']}, seconds in the loop", method["loop_fraction"] * method["seconds"]


def run(checkout: Path, command: Sequence[str]) -> dict[str, float]:
    """The command's numbers in a checkout.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (checkout / "python", checkout)))}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        written = [] if "--json" in command else ["--json", str(path)]
        whole = [sys.executable, *command, *written]
        printed = subprocess.run(whole, cwd=checkout, env=environment, stdout=subprocess.PIPE, check=True, text=True)
        return dict(numbers_of(json.loads(path.read_text() if written else printed.stdout)))


def compared(turns: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float | int]]:
    """After over before, by turn, of all that both have."""
    before, after = turns[BEFORE], turns[AFTER]
    names = [name for name in after[0] if name in before[0]]
    return {name: ratios([one[name] for one in after], [one[name] for one in before]) for name in names}


def main(
    other: Annotated[Path, typer.Argument(help="a checkout of what it is compared with", exists=True, file_okay=False)],
    command: Annotated[list[str], typer.Argument(help="what runs in both, after python; a benchmark gets its --json")],
    turns: Annotated[int, typer.Option(min=1)] = 3,
    json_path: Annotated[Path | None, typer.Option("--to", help="where the numbers of all turns go")] = None,
) -> None:
    """Runs the command in both checkouts, in turns, and shows this one's numbers over the other's."""
    checkouts = {BEFORE: other.resolve(), AFTER: report.ROOT}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for turn in range(turns):
        for name in (BEFORE, AFTER) if turn % 2 == 0 else (AFTER, BEFORE):
            found[name].append(run(checkouts[name], command))
            if json_path is not None:
                report.write(json_path, {"command": command, **found})
    over, table = compared(found), Table("", "after over before")
    for name, ratio in over.items():
        table.add_row(name, f"{ratio['median']:.3f} ({ratio['q1']:.3f} to {ratio['q3']:.3f})")
    speeds = [ratio["median"] for name, ratio in over.items() if "seconds" not in name]
    table.add_row("geometric mean of speeds", f"{statistics.geometric_mean(speeds):.3f}")
    table.add_row("the least of them", f"{min(speeds):.3f}")
    Console(width=None if sys.stdout.isatty() else 160).print(table)


# Options of the command that is compared are not this program's.
app = typer.Typer(pretty_exceptions_enable=False)
app.command(context_settings={"ignore_unknown_options": True})(main)

if __name__ == "__main__":
    app()
