"""Makes the results that pages cite, and says which are older than the code that they measure.

    python bench/regenerate.py                        # all that are not fresh
    python bench/regenerate.py lengths --again        # one of them, fresh or not
    python bench/regenerate.py --stale                # those that are not fresh; exit code 1 if there are any
    python bench/regenerate.py --list                 # all, and the minutes that each takes

``tables.py --write`` writes them into the pages.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from report import ROOT, read_names, stamp, write
from results import BY_NAME, FOLDER, FRESH, Result, digests, state
from rich.console import Console
from rich.table import Table


def make(result: Result, path: Path) -> str | None:
    """Runs the command. Returns why there is no whole result, or None."""
    more = result.environment()
    paths = ("python", ".", *([more["PYTHONPATH"]] if "PYTHONPATH" in more else []))
    environment = {**os.environ, **more, "PYTHONPATH": os.pathsep.join(str(ROOT / path) for path in paths)}
    command = result.arguments(path)
    # Before it runs: the code that runs is that of now.
    about = {
        **stamp(torch.device("cpu" if result.gpu is None else "cuda"), command),
        "sources": digests(result.sources),
    }
    shutil.rmtree(result.folder, ignore_errors=True)  # a benchmark would go on from the rounds of other code
    result.folder.parent.mkdir(parents=True, exist_ok=True)
    output = subprocess.PIPE if result.printed else None
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, stdout=output)
    shutil.rmtree(result.folder, ignore_errors=True)
    if done.returncode:
        return f"exit code {done.returncode}"
    if result.printed:
        content = json.loads(done.stdout)
        for part in result.without:
            leave_out(content, part.split("."))
        write(path, {"benchmark": result.name, "complete": True, **about, **content})
    else:
        write(path, {**json.loads(path.read_text(encoding="utf-8")), "sources": about["sources"]})
    now = state(result, path)
    return None if now == FRESH else now


def leave_out(content: Any, path: Sequence[str]) -> None:
    """Removes what is at the path, if anything is."""
    name, *rest = path
    for each in content if isinstance(content, list) else [content]:
        if not rest:
            each.pop(name, None)
        elif name in each:
            leave_out(each[name], rest)


def show(states: dict[Result, str], folder: Path) -> None:
    table = Table("result", "minutes", "state", "command")
    for result, now in states.items():
        table.add_row(result.name, f"{result.minutes:g}", now, result.line(result.path(folder)))
    Console(width=None if sys.stdout.isatty() else 220).print(table)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="results; default: all", show_default=False)] = None,
    list_only: Annotated[bool, typer.Option("--list", help="what there is, and whether it is fresh")] = False,
    stale: Annotated[bool, typer.Option(help="list those that are not fresh; exit code 1 if there are any")] = False,
    again: Annotated[bool, typer.Option(help="also those that are fresh")] = False,
    folder: Annotated[Path, typer.Option(help="where the results are")] = FOLDER,
) -> None:
    """Makes the results that are not fresh, one after the other. One that fails is reported, and the next one begins.

    Fresh is a whole result, of which nothing that it measures has changed since. Those of models that are not here are
    left out, with the command that makes the models; asked for by name they count as failed.
    """
    folder = folder.absolute()
    asked = [BY_NAME[name] for name in read_names("names", ",".join(names or BY_NAME), BY_NAME)]
    states = {result: state(result, result.path(folder)) for result in asked}
    if stale or list_only:
        shown = {r: now for r, now in states.items() if list_only or now != FRESH}
        show(shown, folder)
        raise typer.Exit(int(stale and bool(shown)))
    console, begun, not_made, failed = Console(stderr=True), time.monotonic(), {}, False
    for result in (r for r in asked if again or states[r] != FRESH):
        if (lack := result.lacks()) is not None:
            not_made[result.name], failed = lack, failed or bool(names)
            continue
        path = result.path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        console.rule(f"{result.name}, after {(time.monotonic() - begun) / 60:.1f} minutes: {result.line(path)}")
        if (why := make(result, path)) is not None:
            not_made[result.name], failed = why, True
    console.print(f"{(time.monotonic() - begun) / 60:.1f} minutes")
    for name, why in not_made.items():
        console.print(f"not made: {name}: {why}", soft_wrap=True)
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
