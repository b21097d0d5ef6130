"""Commands with time limits, each recorded in summary.json, whatever becomes of it. Standard library only."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

TAIL = 4000  # characters of a step's output that summary.json keeps
FINE = ("ok", "left out")  # what cannot be asked of this device is left out; what is missing is skipped, and not fine
GRACE = 5.0  # seconds at a step's end in which it may still write its results


@dataclass
class Step:
    name: str
    command: list[str]
    limit: float  # seconds, less where less is left
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)  # besides the caller's
    log: Path | None = None  # where all of its output goes; summary.json keeps the end


@dataclass
class Run:
    """The time left, and the record, which is written after every step."""

    folder: Path
    deadline: float
    dry: bool
    record: dict = field(default_factory=lambda: {"stages": {}})
    noted: set[str] = field(default_factory=set)  # by this call; the record also keeps the day's earlier ones

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def failed(self) -> list[str]:
        return [name for name in sorted(self.noted) if self.record["stages"][name]["status"] not in FINE]

    def note(self, name: str, status: str, **more: object) -> None:
        self.record["stages"][name] = {"status": status, **more}
        self.noted.add(name)
        print(f"== {name}: {status} {more.get('reason') or ''}".rstrip(), flush=True)
        self.write()

    def write(self) -> None:
        self.record["ok"] = all(stage["status"] in FINE for stage in self.record["stages"].values())
        if not self.dry:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self.folder / "summary.json.partial"
            partial.write_text(json.dumps(self.record, indent=1) + "\n")
            partial.replace(self.folder / "summary.json")

    def run(self, step: Step) -> bool:
        """Runs a step and everything it starts, ended at its limit. Its output is shown and its end kept."""
        limit = min(step.limit, self.left)
        shown = shlex.join([*(f"{name}={value}" for name, value in step.environment.items()), *step.command])
        print(f"== {step.name} (at most {limit:.0f} s): {shown}", flush=True)
        if self.dry:
            return True
        if limit <= GRACE:
            self.note(step.name, "skipped", reason="no time was left (--minutes)")
            return False
        start = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            environment = {**os.environ, **step.environment}
            try:
                process = subprocess.Popen(
                    step.command, cwd=step.folder, env=environment, start_new_session=True, **streams
                )
            except OSError as error:
                self.note(step.name, "failed", reason=str(error), command=step.command)
                return False
            try:
                code = process.wait(timeout=limit - GRACE)
                status, reason = ("ok", None) if code == 0 else ("failed", f"exit code {code}")
            except subprocess.TimeoutExpired:
                status, reason = "timed out", f"ended after {limit:.0f} s; what it wrote until then is kept"
                interrupt(process)
            finally:  # also what the command left running, and the command itself after an interrupt
                signal_group(process, signal.SIGKILL)
                process.wait()
            output.seek(0)
            text = output.read()
            if step.log is not None:
                step.log.write_text(text)
            tail = text[-TAIL:]
        print(tail, flush=True)
        took = round(time.monotonic() - start, 1)
        self.note(step.name, status, reason=reason, seconds=took, command=step.command, output_tail=tail)
        return status == "ok"


def signal_group(process: subprocess.Popen, number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def interrupt(process: subprocess.Popen) -> None:
    """As Ctrl-C would: pytest still writes its report."""
    signal_group(process, signal.SIGINT)
    try:
        process.wait(timeout=GRACE)
    except subprocess.TimeoutExpired:
        pass
