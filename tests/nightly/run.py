"""Runs one part in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from datetime import UTC, datetime
from pathlib import Path

from . import record
from .parts import ROOT, Part

ENVIRONMENTS = ROOT / "build" / "environments"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # where it cannot be reached, the larger builds for GPUs do as well
INTERRUPTED, NO_TESTS = 2, 5  # exit codes of pytest; the first one also where a file cannot be imported
ENDED = {-signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL, INTERRUPTED}


class Ended(Exception):
    """From outside, before it was done: that says nothing of the part."""


def run(part: Part, output: Path) -> dict:
    """What goes into the record. ``output``: a file for all that pytest says."""
    source, started, began = record.commit(), datetime.now(UTC), time.monotonic()
    python = environment(part) if part.requirements else sys.executable
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.nightly.plugin", *part.arguments)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, output.open("w") as file:
        summary = Path(folder) / "summary.json"
        process = subprocess.Popen(
            [python, *command, f"--summary={summary}"], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "python"), str(ROOT)))},
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said = json.loads(summary.read_text()) if summary.exists() else {}
    if process.returncode in ENDED and not said.get("failures"):
        raise Ended(f"{part.name}: ended from outside")
    return {
        **source,
        "date": started.isoformat(timespec="seconds"),
        "command": " ".join(("python", *command)),
        "outcome": "passed" if process.returncode in (0, NO_TESTS) else "failed",
        "seconds": round(time.monotonic() - began),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime),
        **(said or {"failures": [f"exit {process.returncode}"]}),
    }


def environment(part: Part) -> Path:
    """The Python of a virtual environment with a part's requirements; it is made if it is not there.

    The package itself is the repository's, with the extension that was built there: one build serves every torch.
    """
    folder = ENVIRONMENTS / part.name.replace("/", "-")
    python, made = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join((*part.requirements, *_of_tests()))
    if not made.exists() or made.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "-q", "--retries", "1", "--extra-index-url", CPU_INDEX]
        subprocess.run([*install, *wanted.splitlines()], check=True)
        made.write_text(wanted)
    return python


def _of_tests() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["test"]]
