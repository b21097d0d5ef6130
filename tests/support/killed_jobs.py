"""Kills a job again and again, and compares its results with those of an undisturbed job.

    python -m tests.support.killed_jobs --prompts 60 --kills 20

prints, for several settings, how often the job was killed, how many lines each kill left, and whether the output is the
same, byte by byte, for every prompt. The exit code is 1 if it is not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from specdec import load_embedded_pair
from specdec.cli import models

from .commands import invoke

SETTINGS = {
    "greedy": (),
    **{rule: ("--temperature", 0.8, "--rule", rule) for rule in ("token", "block", "coupled")},
    "K adapts": ("--temperature", 0.8, "-k", "auto"),
}
BEGINNINGS = (
    "def read(self):",
    "import os\n",
    "class Node",
    "for i in range(",
    "x = [",
    "try:\n    ",
    "return ",
    "# The",
)


class Killed(NamedTuple):
    lines: list[int]  # complete lines that each kill left
    partial: int  # number of kills that left an incomplete line
    same: bool  # as the output of the undisturbed job
    in_order: bool  # also in the same order, which is not required


def write_prompts(path: Path, number: int) -> Path:
    lengths = (4, 8, 12, 16, 48)
    lines = [
        {"id": f"{i:03}", "prompt": f"{BEGINNINGS[i % 8]}{i}", "max_new_tokens": lengths[i % 5]} for i in range(number)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def start(prompts: Path, output: Path, *options: object) -> int:
    """Starts a process that runs the job: a fork of this one, which need not load the models again."""
    child = os.fork()
    if child:
        return child
    result = invoke("generate", "--batch-file", prompts, "--output", output, "--max-length", 128, *options)
    sys.stderr.write(result.stderr if result.exit_code else "")
    os._exit(result.exit_code)


def run_to_the_end(prompts: Path, output: Path, *options: object) -> float:
    """Runs the job to its end; returns the seconds that it took."""
    began = time.monotonic()
    _, status = os.waitpid(start(prompts, output, *options), 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
    return time.monotonic() - began


def kill_and_resume(folder: Path, prompts: Path, kills: int, seed: int, *options: object) -> Killed:
    alone, output, rng = folder / "alone.jsonl", folder / "killed.jsonl", random.Random(seed)
    seconds = run_to_the_end(prompts, alone, *options)
    lines, partial, most = [], 0, max(1, number_of_lines(alone) * 3 // (4 * kills))
    while len(lines) < kills:
        child, more = start(prompts, output, *options), rng.randint(0, most)
        before, limit = number_of_lines(output), time.monotonic() + seconds
        while number_of_lines(output) < before + more and time.monotonic() < limit:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 2 * seconds / number_of_lines(alone)))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise AssertionError(f"the job was done after {len(lines)} kills: give it more prompts")
        lines.append(number_of_lines(output))
        partial += output.exists() and not output.read_bytes().endswith(b"\n") and output.stat().st_size > 0
    run_to_the_end(prompts, output, *options)
    once, again = (path.read_bytes().splitlines(keepends=True) for path in (alone, output))
    return Killed(lines, partial, sorted(once) == sorted(again), once == again)


def number_of_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    args = parser.parse_args()
    load_once()
    right = True
    for name in args.settings:
        with tempfile.TemporaryDirectory() as folder:
            prompts = write_prompts(Path(folder) / "prompts.jsonl", args.prompts)
            killed = kill_and_resume(Path(folder), prompts, args.kills, args.seed, *SETTINGS[name])
        right &= killed.same
        print(f"{name}: {len(killed.lines)} kills, lines left {killed.lines}, {killed.partial} within a line;", end=" ")
        print(f"same results: {'yes' if killed.same else 'NO'}, same order: {'yes' if killed.in_order else 'no'}")
    return 0 if right else 1


def load_once() -> None:
    loaded = models.Models(*load_embedded_pair(), None)
    models.load = lambda *_: loaded


if __name__ == "__main__":
    sys.exit(main())
