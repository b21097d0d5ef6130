"""What bench/gpu.sh runs: stages with time limits, each recorded in summary.json.

Standard library only: any other module may be missing, and then only what needs it is left out, by name.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import sys
import time
from pathlib import Path

import gpu_stages
from found import ROOT, cuda_tool, gpu_problem, installed, last_line, output_of
from gpu_build import build, extension_problem
from gpu_stages import Machine
from steps import Run

STAGES = ("build", "test", "compare", "sanitize", "bench", "decode", "serve")
# How the time that the build leaves is shared among the stages that were asked for.
WEIGHTS = {"test": 3.3, "compare": 1.7, "sanitize": 2.0, "bench": 3.0, "decode": 3.0, "serve": 2.0}


def share_of(stage: str, stages: list[str]) -> float:
    """Of the time that is left when ``stage`` begins: its weight among those that are still to come."""
    to_come = [s for s in STAGES[STAGES.index(stage) :] if s in stages]
    return WEIGHTS[stage] / sum(WEIGHTS[s] for s in to_come)


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu.sh", description=__doc__)
    parser.add_argument(
        "--stage", action="append", choices=STAGES, help="only this one; may be repeated (default: all)"
    )
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run and write nothing")
    options = parser.parse_args()
    if not options.minutes > 0:
        parser.error(f"--minutes: got {options.minutes}, allowed: > 0")
    device = os.environ.get("SPECDEC_BENCH_DEVICE", "cuda")
    if device not in ("cuda", "cpu"):
        parser.error(f"SPECDEC_BENCH_DEVICE: got {device!r}, allowed: 'cuda', 'cpu'")
    stages = options.stage or list(STAGES)
    deadline = time.monotonic() + options.minutes * 60

    paths = (str(ROOT / "python"), str(ROOT), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    os.environ["PYTHONUNBUFFERED"] = "1"
    problem, gpu = gpu_problem(device)
    run = Run(folder_of(gpu), deadline, options.dry_run)
    run.record = record(run.folder, device, stages)
    for key in ("gpu", "nvcc", "ncu", "compute_sanitizer"):
        print(f"{key}: {run.record[key] or 'none'}")
    run.note("check", "failed" if problem else "ok", reason=problem)
    if "build" not in stages and extension_problem() is not None:
        stages = ["build", *stages]
    machine = Machine(device, problem)
    work = {
        stage: lambda stage=stage: getattr(gpu_stages, stage)(run, machine, run.left * share_of(stage, stages))
        for stage in STAGES[1:]
    }
    work["build"] = lambda: build(run)
    for stage in [s for s in STAGES if s in stages]:
        try:
            work[stage]()
        except Exception as error:  # reported, and the next stage runs
            run.note(stage, "failed", reason=f"{type(error).__name__}: {error}")
    if options.dry_run:
        print("dry run: nothing was run or written")
        return 0
    print(f"results: {run.folder}")
    if run.failed:
        print(f"not ok: {', '.join(run.failed)}")
    return int(bool(run.failed))


def folder_of(gpu: str) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    results = Path(os.environ.get("OUT") or ROOT / "bench" / "results")
    return results / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{slug}"


def record(folder: Path, device: str, stages: list[str]) -> dict:
    """summary.json as it begins: the machine, and what earlier calls of the day left of stages not run now."""
    earlier: dict = {}
    if (folder / "summary.json").exists():
        earlier = json.loads((folder / "summary.json").read_text())
    kept = {name: s for name, s in earlier.get("stages", {}).items() if name.split()[0] not in {"check", *stages}}
    # What a stage leaves beside its steps; a build that is not repeated has no report of its own.
    of_stage = {"ptxas": None, "tests": "test", "tests_left_out": "test", "compared": "compare"}
    more = {key: earlier[key] for key, stage in of_stage.items() if key in earlier and stage not in stages}
    query = ("--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["bench/gpu.sh", *sys.argv[1:]]),
        "device": device,
        "gpu": output_of("nvidia-smi", *query),
        "nvcc": last_line(output_of(cuda_tool("nvcc") or "nvcc", "--version")),
        "ncu": last_line(output_of(cuda_tool("ncu") or "ncu", "--version")),
        "compute_sanitizer": last_line(output_of(cuda_tool("compute-sanitizer") or "compute-sanitizer", "--version")),
        "versions": installed(),
        "stages": kept,
        **more,
    }


if __name__ == "__main__":
    sys.exit(main())
