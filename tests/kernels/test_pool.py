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
    sources = [ROOT / "tests/kernels/pool_jobs.cpp", ROOT / "csrc/cpu/pool.cpp"]
    flags = ["-std=c++20", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}"]
    built = subprocess.run([COMPILER, *flags, *sources, "-o", program], capture_output=True, text=True)
    if built.returncode and "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no library for -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


FORKED = """
import os, torch
from specdec_kernels import linear
torch.set_num_threads(3)
x, weight = torch.ones(1, 1, 500), torch.rand(4000, 500)
expected = linear(x, weight)
for _ in range(20):
    child = os.fork()
    if child == 0:
        right = all(torch.equal(linear(x, weight), expected) for _ in range(20))
        os._exit(0 if right else 1)
    assert torch.equal(linear(x, weight), expected)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_has_its_own():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
