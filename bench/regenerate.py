"""Makes every result that the README and the docs cite, on a CPU, and says which are older than the code they time.

    python bench/regenerate.py                        # all that are not fresh; about 25 minutes on two idle cores
    python bench/regenerate.py throughput --again     # one of them, fresh or not
    python bench/regenerate.py --stale                # those that are not fresh; exit code 1 if there are any

``tables.py`` writes the results into the pages.
"""

from __future__ import annotations

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

import torch
import typer
from report import ROOT, git, stamp, write
from rich.console import Console
from rich.table import Table

FOLDER = ROOT / "bench" / "results" / "cpu"
MEASURING = ("bench/measure.py", "bench/report.py")
KERNELS = ("csrc", "specdec_kernels", "setup.py")
OF_KERNELS = (*MEASURING, *KERNELS, "bench/bench_kernels.py", "bench/cases.py", "bench/peers.py")
LOOP = (*KERNELS, *(f"python/specdec/{room}" for room in ("sampling", "models", "drafters", "loop", "embedded")))
DECODER = (*LOOP, "python/specdec/decoder.py", "python/specdec/prompts.py")
SCHEDULER = (*DECODER, "python/specdec/serving", "bench/jobs.py")
# Without reports and roofs: they say what was measured, or measure nothing.
_FILES = ("compare.py", "contenders.py", "machine.py", "near_ties.py", "rounds.py", "work_counter.py", "verify")
_EVALUATION = (*DECODER, *(f"python/specdec/evaluation/{name}" for name in _FILES))
_BENCH = tuple(f"python/specdec/evaluation/{name}" for name in ("bench", "theory.py"))
_SAMPLES = tuple(f"cells.rounds.{name}" for name in ("inter_token", "by_prompt"))


@dataclass(frozen=True)
class Result:
    """A file of results.

    Attributes:
        command: what makes it, after ``python``; ``{json}`` is the file's path. Without that, its output is the JSON.
            ``{folder}`` is a place for what it writes besides, which is empty before and gone afterwards.
        times: the paths of the code that it measures, and that measures.
        instruction_set: of the C++ kernels; None: the best that the machine has.
        without: parts of a printed JSON that no page cites and that would make the file large, by their path through
            objects; lists on the way are gone through.
    """

    name: str
    command: str
    times: tuple[str, ...]
    instruction_set: str | None = None
    without: tuple[str, ...] = ()

    @property
    def printed(self) -> bool:
        return "{json}" not in self.command

    def arguments(self, path: Path) -> list[str]:
        """The command, in the repository's folder: no result has the name of a machine's folders in it."""
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        return shlex.split(self.command.format(json=shlex.quote(str(shown)), folder=self.folder.relative_to(ROOT)))

    @property
    def folder(self) -> Path:
        return ROOT / "build" / "regenerate" / self.name

    def line(self, path: Path) -> str:
        """The command, as a user would type it."""
        variable = f"SPECDEC_CPU_ISA={self.instruction_set} " if self.instruction_set else ""
        return f"{variable}python {shlex.join(self.arguments(path))}"


_STEP = "bench/bench_kernels.py step -B 1,8 --dtypes float32"
RESULTS = (
    Result("speculative_step", f"{_STEP} --seconds 1.5 --compile-seconds 120 --json {{json}}", OF_KERNELS),
    Result("speculative_step.avx2", f"{_STEP} --seconds 1 --compile-seconds 0 --json {{json}}", OF_KERNELS, "avx2"),
    Result("settings", "bench/bench_kernels.py settings --seconds 40 --json {json}", OF_KERNELS),
    Result(
        "draft_step",
        "bench/bench_kernels.py draft -B 1,8 --dtypes float32 --compile-seconds 60 --json {json}",
        OF_KERNELS,
    ),
    Result(
        "trees",
        "bench/bench_trees.py --json {json}",
        (*OF_KERNELS, "bench/bench_trees.py", "bench/eager_trees.py"),
    ),
    Result(
        "machine_code",
        "bench/machine_code.py --json {json}",
        (
            *("csrc/core", "csrc/cuda", "tests/simt", "bench/cases.py", "bench/report.py"),
            *(f"bench/{name}.py" for name in ("machine_code", "sass", "ptxas", "predicted_times", "step_counts")),
            "python/specdec/evaluation/gpus.py",
        ),
    ),
    Result(
        "scaling",
        "bench/bench_scaling.py --rounds 3 --seconds 4 --json {json}",
        (
            *(*MEASURING, *DECODER, "bench/bench_scaling.py", "bench/scaling_fit.py", "bench/cases.py"),
            *("bench/tunable_pair.py", "python/specdec/evaluation/roofline.py"),
            *("python/specdec/evaluation/model_shapes.py", "python/specdec/evaluation/this_cpu.py"),
        ),
    ),
    Result(
        "bench",
        "-m specdec bench --no-report --json --output {folder}",
        (*_EVALUATION, *_BENCH),
        without=_SAMPLES,
    ),
    Result(
        "bench.compiled",
        "-m specdec bench --compile --method model --temperature 0 --no-report --json --output {folder}",
        (*_EVALUATION, *_BENCH),
        without=_SAMPLES,
    ),
    Result("compare", "-m specdec compare --max-new-tokens 96 --json", _EVALUATION),
    Result("compare.compiled", "-m specdec compare --max-new-tokens 96 --compile --json", _EVALUATION),
    Result(
        "throughput",
        "bench/bench_throughput.py --rounds 3 --json {json}",
        (*MEASURING, *SCHEDULER, "bench/bench_throughput.py"),
    ),
    Result(
        "lengths",
        "bench/bench_lengths.py --json {json}",
        (*MEASURING, *SCHEDULER, "bench/bench_lengths.py", "bench/bench_decoding.py"),
    ),
    Result(
        "load_aware",
        "bench/bench_load_aware.py --json {json}",
        (*MEASURING, *SCHEDULER, "bench/bench_load_aware.py", "bench/bench_lengths.py"),
    ),
    Result(
        "server",
        "bench/bench_server.py --json {json}",
        (*MEASURING, *SCHEDULER, "bench/bench_server.py", "bench/streaming_clients.py", "bench/bench_lengths.py"),
    ),
    Result(
        "drafters",
        "bench/bench_decoding.py drafters --rounds 3 --json {json}",
        (*MEASURING, *SCHEDULER, "bench/bench_decoding.py", "bench/tunable_pair.py"),
    ),
    Result("heads", "bench/bench_heads.py --rounds 4 --json {json}", (*MEASURING, *DECODER, "bench/bench_heads.py")),
    Result(
        "advise",
        "bench/bench_advise.py --json {json}",
        (*MEASURING, *_EVALUATION, "bench/bench_advise.py", "bench/tunable_pair.py"),
    ),
    Result(
        "better_draft",
        "bench/bench_better_draft.py --json {json}",
        (*MEASURING, *_EVALUATION, "bench/bench_better_draft.py", "bench/bench_advise.py", "bench/bench_distill.py"),
    ),
    Result(
        "distill",
        "bench/bench_distill.py --json {json}",
        ("python/specdec/training", "python/specdec/embedded/target", "bench/bench_distill.py"),
    ),
    Result("rules", "bench/bench_decoding.py rules --json {json}", (*DECODER, "bench/bench_decoding.py")),
    Result("verify", "-m specdec verify --samples 512 --json", _EVALUATION),
    Result("verify.bfloat16", "-m specdec verify --dtype bfloat16 --check greedy --check coupled --json", _EVALUATION),
)


def state(result: Result, path: Path) -> str:
    """Returns "fresh", or why the file has to be made (again)."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return "missing"
    except json.JSONDecodeError:
        return "no JSON"
    if content.get("quick") or not content.get("complete"):
        return "incomplete"
    if content.get("dirty") is not False:
        return "its code was not committed"
    if result.instruction_set not in (None, content.get("instruction_set")):
        return f"made with {content.get('instruction_set')}"
    changed = git("diff", "--stat=200", content["commit"], "--", *result.times)
    if changed is None:
        return f"its commit {content['commit'][:10]} is unknown here"
    return "fresh" if not changed else f"older than its code:{changed.splitlines()[-1]}"


def make(result: Result, path: Path) -> str | None:
    """Runs the command. Returns why there is no whole result, or None."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "python", ROOT)))}
    if result.instruction_set:
        environment["SPECDEC_CPU_ISA"] = result.instruction_set
    command = result.arguments(path)
    about = stamp(torch.device("cpu"), command)  # before it runs: the code that runs is that of now
    shutil.rmtree(result.folder, ignore_errors=True)  # a benchmark would go on from the rounds of other code
    result.folder.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE if result.printed else None
    )
    shutil.rmtree(result.folder, ignore_errors=True)
    if result.printed and done.returncode == 0:
        content = json.loads(done.stdout)
        for part in result.without:
            leave_out(content, part.split("."))
        write(path, {"benchmark": result.name, "complete": True, **about, **content})
    if done.returncode:
        return f"exit code {done.returncode}"
    now = state(result, path)
    return None if now in ("fresh", "its code was not committed") else now


def leave_out(content: Any, path: Sequence[str]) -> None:
    """Removes what is at the path, if anything is."""
    name, *rest = path
    for each in content if isinstance(content, list) else [content]:
        if not rest:
            each.pop(name, None)
        elif name in each:
            leave_out(each[name], rest)


def show(states: dict[Result, str], folder: Path) -> None:
    table = Table("result", "state", "command")
    for result, now in states.items():
        table.add_row(result.name, now, result.line(folder / f"{result.name}.json"))
    Console(width=None if sys.stdout.isatty() else 220).print(table)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="results; default: all", show_default=False)] = None,
    list_only: Annotated[bool, typer.Option("--list", help="what there is, and whether it is fresh")] = False,
    stale: Annotated[bool, typer.Option(help="list those that are not fresh; exit code 1 if there are any")] = False,
    again: Annotated[bool, typer.Option(help="also those that are fresh")] = False,
    minutes: Annotated[float, typer.Option(min=0, help="after which no result begins")] = float("inf"),
    folder: Annotated[Path, typer.Option(help="where the results are")] = FOLDER,
) -> None:
    """Makes the results that are not fresh, one after the other. One that fails is reported, and the next one begins.

    Fresh is a whole result of committed code, of which nothing that it measures has changed since.
    """
    known = {result.name: result for result in RESULTS}
    if unknown := [name for name in names or () if name not in known]:
        raise typer.BadParameter(f"names: got {unknown[0]!r}, allowed: {', '.join(known)}")
    folder = folder.absolute()
    asked = [known[name] for name in names or known]
    states = {result: state(result, folder / f"{result.name}.json") for result in asked}
    if stale or list_only:
        shown = {r: now for r, now in states.items() if list_only or now != "fresh"}
        show(shown, folder)
        raise typer.Exit(int(stale and bool(shown)))
    console, begun, failed = Console(stderr=True), time.monotonic(), {}
    for result in (r for r in asked if again or states[r] != "fresh"):
        spent, path = (time.monotonic() - begun) / 60, folder / f"{result.name}.json"
        if spent >= minutes:
            failed[result.name] = f"not begun (--minutes {minutes:g})"
            continue
        console.rule(f"{result.name}, after {spent:.1f} minutes: {result.line(path)}")
        if (why := make(result, path)) is not None:
            failed[result.name] = why
    console.print(f"{(time.monotonic() - begun) / 60:.1f} minutes")
    for name, why in failed.items():
        console.print(f"not made: {name}: {why}")
    raise typer.Exit(int(bool(failed)))


if __name__ == "__main__":
    typer.run(main)
