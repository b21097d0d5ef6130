"""Every program of examples/ runs, and prints what it promises."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import specdec
import torch

import specdec_kernels

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# The packages that are tested here, wherever the examples would find others; on a CPU, where texts are repeatable.
PATHS = [str(Path(package.__file__).resolve().parents[1]) for package in (specdec, specdec_kernels)]


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.nightly)], ids=["here", "in its own process"])
def printed(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture) -> Callable[[str], str]:
    """What a program prints. Every day it runs in this process, which has imported all libraries."""

    def run_here(name: str) -> str:
        with torch.random.fork_rng():
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    def run(name: str) -> str:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
        process = subprocess.run([sys.executable, EXAMPLES / name], env=env, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        return process.stdout

    return run if request.param else run_here


def test_generate(printed):
    text = printed("generate.py")
    assert text.startswith("def read(self, size=-1):") and "\nclass Stack:" in text
    summaries = re.findall(r"^--- (\{.*\}) in (\d+) steps: alpha (0\.\d\d), tau (\d\.\d\d)$", text, flags=re.MULTILINE)
    assert len(summaries) == 2
    for counts, steps, _, tau in summaries:
        producers = dict(re.findall(r"'(\w+)': (\d+)", counts))
        assert set(producers) <= {"accepted", "recovered", "bonus"}
        assert sum(map(int, producers.values())) == 48
        assert float(tau) == pytest.approx(48 / int(steps), abs=0.005)


def test_in_transformers(printed):
    text = printed("in_transformers.py")
    assert text.startswith("def read(self):") and "\n---\nimport os" in text
    *_, same, counts = text.splitlines()
    assert same == "the same text as without specdec: True"
    tokens, steps = map(int, re.match(r"(\d+) tokens in (\d+) steps, tau ", counts).groups())
    assert tokens == 64 and steps < 64


def test_serving(printed):
    text = printed("serving.py")
    ends = re.findall(r"^--- request (\d): (\d+) new tokens, end: length\n(.*)$", text, flags=re.MULTILINE)
    starts = ("import os", "def add(a, b):", "class Stack:", "for line in file:", "try:")
    assert sorted(int(number) for number, _, _ in ends) == [0, 1, 2, 3, 4]
    for number, tokens, line in ends:
        assert int(tokens) == 8 * (1 + int(number)) and line.startswith(starts[int(number)])


def test_kernels_alone(printed):
    lines = printed("kernels_alone.py").splitlines()
    assert len(lines) == 3
    for b, line in enumerate(lines):
        accepted, tokens = re.fullmatch(rf"sequence {b}: (\d) of 4 drafts accepted, tokens \[(.*)\]", line).groups()
        tokens = [int(token) for token in tokens.split(", ")]
        emitted = int(accepted) + 1
        assert all(0 <= token < 32000 for token in tokens[:emitted]) and tokens[emitted:] == [-1] * (5 - emitted)


def test_none_is_left_out():
    tested = {"generate.py", "in_transformers.py", "serving.py", "kernels_alone.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested
