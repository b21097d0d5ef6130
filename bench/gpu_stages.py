"""The stages of bench/gpu.sh after the build: test, compare, sanitize, bench, decode, serve. Standard library only.

A step that fails, runs out of time or lacks something is noted, and the next one runs.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass

from found import ROOT, cuda_tool, missing, third_party
from steps import Run, Step

NEEDED = {  # stage: modules without which it cannot run at all
    "test": ("torch", "pytest"),
    "compare": ("torch", "typer", "rich", "scipy", "numpy"),
    "sanitize": ("torch", "typer", "scipy", "numpy"),
    "bench": ("torch", "transformers", "safetensors", "typer", "rich"),
    "decode": ("torch", "transformers", "safetensors", "typer", "rich"),
    "serve": ("torch", "transformers", "safetensors", "typer", "rich"),
}
# On a CPU, where .ci/run has the whole suite, so many that the stage is seen to work.
FEW_TESTS = ("test_ops.py", "test_validation.py", "test_capture.py", "test_bench_measure.py")
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
TRITON_VARIANTS = "12"  # each is compiled when it first comes
STARTING = 25.0  # seconds that a step may take beyond what it was told: imports, the first kernels, a last case
STARTING_WATCHED = 35.0  # the same under compute-sanitizer
LEAST_WATCHED = 45.0  # seconds for one of its tools, or it is left out
COMPILING = 90.0  # seconds that one method of bench_decoding_goals.py may take, torch.compile included


@dataclass
class Machine:
    device: str  # "cuda" or "cpu"
    problem: str | None  # why cuda cannot be used


def stopped(run: Run, stage: str, *reasons: str | None) -> bool:
    """Notes why the stage cannot run, if it cannot. A dry run goes on to show the commands."""
    absent = missing(NEEDED[stage])
    why = [r for r in (*reasons, f"missing: {', '.join(absent)}" if absent else None) if r]
    if why:
        run.note(stage, "skipped", reason="; ".join(why))
    return bool(why) and not run.dry


def test(run: Run, machine: Machine, seconds: float) -> None:
    if stopped(run, "test"):
        return
    junit = run.folder / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}"]
    on_gpu, left_out = machine.device == "cuda", {}
    for file in sorted((ROOT / "tests").glob("test_*.py")):
        if not on_gpu and file.name not in FEW_TESTS:
            continue
        if absent := missing(tuple(sorted(third_party(file, set())))):
            left_out[file.name] = absent
            print(f"{file.name} is left out: missing {', '.join(absent)}")
        if on_gpu and absent:
            command.append(f"--ignore=tests/{file.name}")
        elif not on_gpu and not absent:
            command.append(f"tests/{file.name}")
    run.record["tests_left_out"] = left_out
    if on_gpu and not missing(("xdist",)):
        command += ["-n", str(min(8, os.cpu_count() or 1)), "--dist", "worksteal"]
    if not run.dry:
        junit.unlink(missing_ok=True)  # of an earlier call
    run.run(Step("test", command, seconds, ROOT))
    if not run.dry and junit.exists():
        suite = re.search(r"<testsuite .*?>", junit.read_text())
        counts = re.findall(r'(errors|failures|skipped|tests|time)="([\d.]+)"', suite[0] if suite else "")
        run.record["tests"] = {name: float(value) for name, value in counts}
        run.write()


def compare(run: Run, machine: Machine, seconds: float) -> None:
    """Tokens of every backend against the reference's. Triton compiles every mix of rule, dtypes and form, so it gets
    few of them, and a process of its own."""
    if stopped(run, "compare", machine.problem):
        return
    plans: list[tuple[str, tuple[str, ...], float, tuple[str, ...]]] = [("cpu", ("cpu",), 1.0, ())]
    if machine.device == "cuda":
        plans = [
            ("cuda", ("cuda", "cpu"), 0.6, ()),
            ("triton", ("triton",), 0.4, ("--variants", TRITON_VARIANTS)),
        ]
    for name, backends, share, options in plans:
        result, limit = run.folder / f"compare.{name}.json", seconds * share
        command = [sys.executable, "bench/compare_backends.py", "--device", machine.device]
        command += ["--backends", ",".join(backends), "--seconds", f"{max(5.0, limit - STARTING):.0f}"]
        one_thread = {"OMP_NUM_THREADS": "1"} if machine.device == "cpu" else {}
        if not run.dry:
            result.unlink(missing_ok=True)  # of an earlier call
        run.run(Step(f"compare {name}", [*command, "--json", str(result), *options], limit, ROOT, one_thread))
        if not run.dry and result.exists():
            content = json.loads(result.read_text())
            of_plan = {row["backend"]: {k: row[k] for k in ("cases", "near_ties")} for row in content["rows"]}
            run.record.setdefault("compared", {})[name] = of_plan | {"disagreement": content.get("disagreement")}
            run.write()


def sanitize(run: Run, machine: Machine, seconds: float) -> None:
    """compute-sanitizer's tools over steps with tails; each allocation its own, so that what is beyond it is seen."""
    if machine.device == "cpu":
        return run.note("sanitize", "left out", reason="it needs a GPU; on a CPU tests/simt watches the kernels")
    sanitizer = cuda_tool("compute-sanitizer")
    absent = None if sanitizer else "compute-sanitizer is neither on the PATH nor in CUDA_HOME/bin"
    if stopped(run, "sanitize", machine.problem, absent):
        return None
    tools = SANITIZERS[: max(1, int(seconds / LEAST_WATCHED))]
    for tool in SANITIZERS[len(tools) :]:
        run.note(f"sanitize {tool}", "left out", reason=f"{seconds:.0f} s are too few for it beside {', '.join(tools)}")
    for i, tool in enumerate(tools):
        limit = min(seconds, run.left) / (len(tools) - i)
        command = [sanitizer or "compute-sanitizer", "--tool", tool, "--error-exitcode", "86", sys.executable]
        steps_end = f"{max(5.0, limit - STARTING_WATCHED):.0f}"
        command += ["bench/sanitize_steps.py", "--device", "cuda", "--seconds", steps_end]
        before = run.left
        run.run(Step(f"sanitize {tool}", command, limit, ROOT, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}))
        seconds -= before - run.left
    return None


def timed(run: Run, stage: str, stem: str, where: str, limit: float, *options: str, **environment: str) -> None:
    result = f"{run.folder}/{stem}.{where}.json" if stage != "serve" else f"{run.folder}/{stem}.serve.{where}.json"
    command = [sys.executable, f"bench/bench_{stem}.py", "--device", where, "--json", result, *options]
    run.run(Step(f"{stage} {stem}.{where}", command, limit, ROOT, environment))


def bench(run: Run, machine: Machine, seconds: float) -> None:
    if stopped(run, "bench", machine.problem):
        return
    if machine.device == "cpu":
        for stem in ("goals", "speculative_step", "draft_step", "settings", "decoding"):
            # More threads wait for each other on a shared machine.
            timed(run, "bench", stem, "cpu", 90, "--quick", "--threads", "1")
        return
    without: dict[str, str] = {}
    end = run.left - seconds

    def left() -> float:
        return run.left - end

    if not missing(("flashinfer",)) or run.dry:  # compiled at its first call, which no benchmark has the time for
        command = [sys.executable, "bench/flashinfer_peer.py"]
        if not run.run(Step("bench flashinfer", command, min(180, left() * 0.35), ROOT)) and not run.dry:
            without["SPECDEC_BENCH_WITHOUT"] = "flashinfer"
    # A step that is cut short keeps its rows, so the longest come last and get what is left.
    goals = ("--seconds", "3", "--compile-seconds", "25")
    timed(run, "bench", "goals", "cuda", min(240, left() * 0.55), *goals, **without)
    settings = ("--batches", "8", "--seconds", "10", "--dtypes", "bfloat16")
    timed(run, "bench", "settings", "cuda", min(60, left() * 0.25), *settings, **without)
    drafts = ("--seconds", "0.3", "--compile-seconds", "20")
    timed(run, "bench", "draft_step", "cuda", min(60, left() * 0.25), *drafts, **without)
    few = ("--preset", "1b", "-K", "4", "--new-tokens", "64", "--seconds", "5", "--rounds", "3")
    timed(run, "bench", "decoding", "cuda", min(90, left() * 0.4), *few, **without)
    steps = ("--seconds", "0.3", "--compile-seconds", str(int(max(left(), 0) * 0.3)))
    timed(run, "bench", "speculative_step", "cuda", left(), *steps, **without)


def decoding_goals(run: Run, stage: str, limit: float, *options: str) -> None:
    """What no time is left for is named in the results: a cell is written when it ends."""
    enough = f"{max(30.0, limit - COMPILING):.0f}"
    timed(run, stage, "decoding_goals", "cuda", limit, "--pair", "8b+1b", "--limit", enough, *options)


def decode(run: Run, machine: Machine, seconds: float) -> None:
    """The goals of one sequence."""
    if stopped(run, "decode", machine.problem):
        return
    if machine.device == "cpu":
        timed(run, "decode", "decoding_goals", "cpu", 120, "--quick", "--threads", "1", "-B", "1")
        return
    modes = "compiled+graphs+deferred,graphs+deferred,graphs,eager,compiled+graphs"
    decoding_goals(run, "decode", seconds, "-B", "1", "--modes", modes)


def serve(run: Run, machine: Machine, seconds: float) -> None:
    """Many sequences."""
    if stopped(run, "serve", machine.problem):
        return
    if machine.device == "cpu":
        timed(run, "serve", "throughput", "cpu", 120, "--quick", "--threads", "1")
        return
    end = run.left - seconds
    rows = ("--parts", "rows", "--rows", "1,8,32", "--rounds", "3")
    timed(run, "serve", "throughput", "cuda", min(60, seconds * 0.2), *rows)
    few = ("--modes", "compiled+graphs+deferred,graphs+deferred", "--rounds", "2", "--new-tokens", "64")
    decoding_goals(run, "serve", run.left - end, "-B", "8,32", *few)
