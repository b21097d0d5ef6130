"""The threads of native operations: every task is done once, without races, in forked processes as well."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_jobs_of_several_threads(sanitizer, tmp_path):
    program = tmp_path / "jobs"
    sources = [ROOT / "tests/layers/pool_jobs.cpp", ROOT / "csrc/common/pool.cpp"]
    flags = ["-std=c++20", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}"]
    built = subprocess.run([COMPILER, *flags, *sources, "-o", program], capture_output=True, text=True)
    if built.returncode and "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no library for -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


FORKED = """
import os, torch
from specdec_layers import linear
torch.set_num_threads(3)
x, weight = torch.ones(1, 1, 500), torch.rand(4000, 500)
expected = linear(x, weight)
for _ in range(20):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(3)
        right = all(torch.equal(linear(x, weight), expected) for _ in range(20))
        os._exit(0 if right else 1)
    assert torch.equal(linear(x, weight), expected)
    assert os.waitpid(child, 0)[1] == 0
"""


# A process in a process in a process, each of which computes after it was made, while another thread of the first one
# computes on. Products of matrices are PyTorch's, whose own threads do not survive a fork.
NESTED = """
import os, signal, sys, threading, torch
from specdec_kernels import SamplingParams, draft_step
from specdec_layers import linear, native_threads
depth, rounds = map(int, sys.argv[1:])
torch.set_num_threads(3)
x, weight, logits = torch.ones(1, 1, 500), torch.rand(4000, 500), torch.randn(3, 70000)

def work():
    with native_threads():
        inside = linear(x, weight)
    drawn = draft_step(logits, SamplingParams(), seed=1, position=0, offset=0).tokens
    return [inside, linear(x, weight), drawn, (weight.T @ weight)[:5, :5]]

expected = work()

def on():
    while True:
        work()

threading.Thread(target=on, daemon=True).start()

def nested(depth):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        right = all(torch.allclose(a, b, rtol=1e-3) for _ in range(3) for a, b in zip(work(), expected))
        assert torch.get_num_threads() == 1
        os._exit((nested(depth - 1) if depth > 1 else 0) if right else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

ended = [nested(depth) for _ in range(rounds)]
print(ended)
os._exit(any(ended))
"""

WORKERS = """
import multiprocessing, torch
from torch.utils.data import DataLoader
from specdec_kernels import SamplingParams, draft_step

class Drawn(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, i):
        torch.randn(400, 400) @ torch.randn(400, 400)
        return draft_step(logits, SamplingParams(), seed=i, position=0, offset=0).tokens

torch.set_num_threads(3)
logits = torch.randn(2, 70000)
expected = [Drawn()[i].tolist() for i in range(6)]
loader = DataLoader(Drawn(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
assert [tokens.tolist() for tokens in loader] == expected
with multiprocessing.get_context("fork").Pool(2) as pool:
    found = pool.map_async(Drawn().__getitem__, range(6)).get(timeout=60)
assert [tokens.tolist() for tokens in found] == expected
"""
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def run(program: str, *arguments: int) -> None:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_fork
def test_a_forked_process_has_its_own():
    run(FORKED)


@needs_fork
@pytest.mark.parametrize(
    ("depth", "rounds"), [(1, 2), (6, 2), *(pytest.param(d, 20, marks=pytest.mark.nightly) for d in range(1, 7))]
)
def test_forks_of_forks(depth, rounds):
    run(NESTED, depth, rounds)


@needs_fork
def test_workers_that_are_forked():
    run(WORKERS)


SHARED = """
import os, torch
from specdec_kernels import SamplingParams, draft_step
from specdec_layers import linear, native_threads
torch.set_num_threads(3)
x, weight, logits = torch.ones(1, 1, 500), torch.rand(4000, 500), torch.randn(3, 70000)
torch.randn(1 << 20).exp()  # PyTorch's threads are there

def product():
    linear(x, weight)

def draw():
    draft_step(logits, SamplingParams(), seed=1, position=0, offset=0)

def threads():
    return len(os.listdir("/proc/self/task"))

first, second = {order}
before = threads()
with native_threads():  # both have them: PyTorch's one thread is not theirs
    first()
    assert threads() == before + 2, (before, threads())
    second()
second()
assert threads() == before + 2, (before, threads())
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
@pytest.mark.parametrize("order", ["product, draw", "draw, product"])
def test_both_packages_have_the_same_threads(order):
    """Idle threads wait by spinning, and two pools would take cores from each other."""
    run(SHARED.replace("{order}", order))
