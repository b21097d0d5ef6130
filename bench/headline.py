"""The six results that are made again with every change that touches them, within 30 minutes on two cores.

    python bench/headline.py                  # makes all of them, and writes their tables into docs/numbers.md
    python bench/headline.py job clients      # some of them
    python bench/headline.py --tables         # writes the tables of the results that are there, and measures nothing
    python bench/headline.py --quick          # in minutes: shows that all run; goes to build/headline/, its numbers are
                                              # worth nothing

Each is one command, which anybody can run alone, and one file in ``results/`` with that command, the commit, the date
and the machine. A result whose model is not here is left out, and so is a program that is not installed: a line says
so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import headline_tables
import torch
import typer
from report import ROOT, card, read_names, stamp, write
from rich.console import Console

RESULTS, PAGE = ROOT / "bench" / "results", ROOT / "docs" / "numbers.md"
TRIED = ROOT / "build" / "headline"  # of --quick
MODEL = "real_models/SmolLM2-135M-Instruct"
MADE_BY = "python tools/real_models.py SmolLM2-135M-Instruct --packed"
RIVALS = {"--vllm": "build/vllm/bin/python", "--openvino": "build/openvino/bin/python"}  # environments of their own
LLAMA = "llama_cpp"  # the package
# Parts of what ``specdec bench`` prints that no table has and that would make the file large.
SAMPLES = ("samples", "cells.rounds.inter_token")


@dataclass(frozen=True)
class Headline:
    """
    Attributes:
        name: of its file.
        command: what makes it, after ``python``; ``{json}`` is the file. Without that, its output is the JSON.
        quick: the same in seconds.
        needs: files and folders without which it cannot be made.
        gpu: whether it needs one.
        rivals: whether other programs are measured, those that are here.
    """

    name: str
    command: str
    quick: str
    needs: tuple[str, ...] = ()
    gpu: bool = False
    rivals: bool = False

    def lacks(self) -> str | None:
        """Why it cannot be made here."""
        if self.gpu and not torch.cuda.is_available():
            return "no GPU"
        missing = [path for path in self.needs if not (ROOT / path).exists()]
        return f"no {', '.join(missing)}: {MADE_BY}" if missing else None

    def left_out(self) -> list[str]:
        """The programs that it is compared with and that are not here, and why."""
        if not self.rivals:
            return []
        found = [] if importlib.util.find_spec(LLAMA) else ["llama.cpp: pip install llama-cpp-python gguf"]
        absent = [(option, python) for option, python in RIVALS.items() if not (ROOT / python).exists()]
        return found + [f"{option.removeprefix('--')}: no {python}" for option, python in absent]

    def file(self, folder: Path) -> Path:
        return folder / (card() if self.gpu else "cpu") / f"{self.name}.json"

    def arguments(self, file: Path, quick: bool) -> list[str]:
        shown = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
        command = self.quick if quick else self.command
        found = shlex.split(command.format(json=shlex.quote(str(shown)), build=TRIED.relative_to(ROOT)))
        for option, python in RIVALS.items():
            found += [option, python] if self.rivals and (ROOT / python).exists() else []
        return found

    def make(self, file: Path, quick: bool) -> str | None:
        """Runs the command. Returns why there is no result, or None."""
        arguments = self.arguments(file, quick)
        about = stamp(torch.device("cuda" if self.gpu else "cpu"), arguments)  # before it runs: of the code that runs
        printed = "{json}" not in self.command
        paths = os.pathsep.join([str(ROOT / "python"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        shutil.rmtree(TRIED / "bench", ignore_errors=True)  # or it would go on from the rounds of an earlier run
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE if printed else None,
        )  # fmt: skip
        if done.returncode:
            return f"exit code {done.returncode}"
        if printed:
            content = json.loads(done.stdout)
            for part in SAMPLES:
                leave_out(content, part.split("."))
            write(file, {"benchmark": self.name, "complete": True, "quick": quick, **about, **content})
        return None


BENCH = f"-m specdec bench --target {MODEL} --dtype float32 --no-report --json --output {{build}}/bench"
METHODS = "--method assisted --method lookup --method suffix -k auto"
OF_RIVALS = f"bench/rivals.py {MODEL} --gguf {MODEL}.gguf --rounds 1 --json {{json}}"
OF_CLIENTS = f"bench/bench_clients.py {MODEL} --json {{json}}"
OF_JOB = f"bench/bench_job.py {MODEL} --json {{json}}"
STEP = "bench/bench_kernels.py step -B 1,8 --dtypes float32 -V 128256 -K 5 --json {json}"
GOALS = "bench/bench_kernels.py goals --device cuda --seconds 0.4 --compile-seconds 0 --json {json}"
DECODE = "bench/bench_loop.py --device cuda --contexts 512 --modes graphs+deferred --no-assisted --json {json}"
HEADLINES = (
    Headline("speculative_step", f"{STEP} --seconds 5 --compile-seconds 120", f"{STEP} --quick"),
    Headline(
        "smollm2", f"{BENCH} {METHODS} --max-new-tokens 96 --repeats 2",
        f"{BENCH} {METHODS} --category edit --category story --temperature 0 --max-new-tokens 8 --repeats 1", (MODEL,),
    ),
    Headline(
        "rivals", f"{OF_RIVALS} --prompts 6 --new-tokens 64", f"{OF_RIVALS} --kinds '8 bits' --quick",
        (MODEL, f"{MODEL}.gguf"), rivals=True,
    ),
    Headline("clients", f"{OF_CLIENTS} --rounds 2", f"{OF_CLIENTS} --quick", (MODEL,)),
    Headline("job", f"{OF_JOB} --rounds 2", f"{OF_JOB} --quick", (MODEL,)),
    Headline(
        "decode", f"{DECODE} --pair 8b+1b -B 1,8,32 --new-tokens 64 --rounds 3 --limit 125",
        f"{DECODE} -B 1 --quick", gpu=True,
    ),
    Headline("goals", GOALS, f"{GOALS} --quick", gpu=True),
)  # fmt: skip
BY_NAME = {headline.name: headline for headline in HEADLINES}


def leave_out(content: Any, path: Sequence[str]) -> None:
    """Removes what is at the path, if anything is; lists on the way are gone through."""
    name, *rest = path
    for each in content if isinstance(content, list) else [content]:
        if not rest:
            each.pop(name, None)
        elif name in each:
            leave_out(each[name], rest)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="some of them; default: all", show_default=False)] = None,
    quick: Annotated[bool, typer.Option(help="shows that they run; docs/numbers.md stays as it is")] = False,
    tables: Annotated[bool, typer.Option(help="writes the page alone")] = False,
) -> None:
    """Makes the results, one after the other, and writes their tables. One that fails is reported, the next begins."""
    asked = [BY_NAME[name] for name in read_names("names", ",".join(names or BY_NAME), BY_NAME)]
    folder, page = (TRIED, TRIED / "numbers.md") if quick else (RESULTS, PAGE)
    console, begun, not_made, failed = Console(stderr=True), time.monotonic(), dict[str, str](), False
    for headline in [] if tables else asked:
        if (lack := headline.lacks()) is not None:
            not_made[headline.name] = lack
            continue
        not_made |= dict(why.split(": ", 1) for why in headline.left_out())
        file = headline.file(folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        line = shlex.join(["python", *headline.arguments(file, quick)])
        console.rule(f"{headline.name}, after {(time.monotonic() - begun) / 60:.1f} minutes: {line}")
        if (why := headline.make(file, quick)) is not None:
            not_made[headline.name], failed = why, True
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(headline_tables.written(PAGE.read_text(encoding="utf-8"), folder), encoding="utf-8")
    console.print(f"{page.relative_to(ROOT)} is written, {(time.monotonic() - begun) / 60:.1f} minutes")
    for name, why in not_made.items():
        console.print(f"left out: {name}: {why}", soft_wrap=True)
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
