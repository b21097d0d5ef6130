"""bench/gpu.sh without a GPU: what it would run, what it refuses, and that it goes on after a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT


def gpu_sh(*arguments: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", ROOT / "bench" / "gpu.sh", *arguments]
    env = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_a_dry_run_prints_commands_and_writes_nothing(tmp_path):
    done = gpu_sh("--dry-run", folder=tmp_path, OUT="out", TORCH_CUDA_ARCH_LIST="9.0a")
    commands = ["setup.py", "TORCH_CUDA_ARCH_LIST=9.0a", "-m pytest", "-m tests.fuzz --device cuda"]
    commands += [f"bench_kernels.py {group}" for group in ("goals", "settings", "draft", "step")]
    commands += ["bench_decoding.py loop", "bench_throughput.py", str(tmp_path / "out")]
    commands += [f"--tool {tool}" for tool in ("memcheck", "racecheck", "synccheck", "initcheck")]
    commands += ["tests.fuzz.sanitize --device cuda", "bench/peers.py", "--backends triton"]
    for command in commands:
        assert command in done.stdout
    assert not list(tmp_path.iterdir())


def test_stages_can_be_chosen():
    done = gpu_sh("--dry-run", "--stage", "fuzz", "--stage", "serve")
    assert done.returncode == 0, done.stderr
    named = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("==")]
    assert named == ["fuzz-cuda", "fuzz-triton", "serve-throughput", "serve-lengths", "serve-loop"]


@pytest.mark.parametrize(
    "arguments, environment, named",
    [
        (("--stage", "deploy"), {}, "--stage"),
        (("--minutes", "0"), {}, "--minutes"),
        ((), {"PYTHON": "no-such-python"}, "PYTHON"),
    ],
)
def test_what_is_wrong_is_named(arguments, environment, named):
    done = gpu_sh(*arguments, **environment)
    assert done.returncode == 2 and named in done.stderr


def test_a_failure_is_reported_and_the_next_stage_runs(tmp_path):
    """The interpreter fails at whatever it is given but the first question, so every step does."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *version_info*|*missing*) exec {sys.executable} "$@";; esac\nexit 3\n')
    python.chmod(0o755)
    environment = {"PYTHON": str(python), "OUT": str(tmp_path / "out")}
    done = gpu_sh("--stage", "fuzz", "--stage", "serve", **environment)
    assert done.returncode == 1
    assert "not ok: fuzz-cuda" in done.stdout and "not ok: serve-throughput" in done.stdout
    (folder,) = (tmp_path / "out").iterdir()
    steps = [line.split(",")[:2] for line in (folder / "steps.csv").read_text().splitlines()]
    serve = ("serve-throughput", "serve-lengths", "serve-loop")
    assert steps == [[name, "3"] for name in ("fuzz-cuda", "fuzz-triton", *serve)]
    assert {f.name for f in folder.iterdir()} >= {"environment.txt", "fuzz-cuda.log", "serve-throughput.log"}


def test_no_step_begins_when_the_time_is_up(tmp_path):
    environment = {"OUT": str(tmp_path)}
    done = gpu_sh("--stage", "fuzz", "--minutes", "0.01", **environment)
    assert done.returncode == 1 and "not ok: fuzz-cuda" in done.stdout
    assert "--minutes" in next(tmp_path.rglob("fuzz-cuda.log")).read_text()
