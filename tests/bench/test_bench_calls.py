"""bench/bench_calls.py: what it times without a GPU."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import bench_calls
import pytest
import torch
import triton.backends.nvidia as nvidia
from support.benches import run_main


def test_calls_of_the_native_half(tmp_path):
    path = tmp_path / "calls.json"
    done = run_main(bench_calls, "--backend", "cpu", "--quick", "--json", path)
    assert done.exit_code == 0, done.output
    rows = json.loads(path.read_text())["rows"]
    assert {row["call"] for row in rows} == bench_calls.calls("cpu").keys()
    assert all(row["backend"] == "cpu" and 0 < row["least"] <= row["us"] for row in rows)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_driver_that_does_nothing_has_what_triton_calls(tmp_path):
    here, source = Path(nvidia.__file__).parent, Path(bench_calls.__file__).with_name("no_driver.c")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", f"-I{here / 'include'}", source, "-o", library], check=True)
    called = set(
        re.findall(r"CUDA_CHECK_AND_RETURN_NULL(?:_ALLOW_THREADS)?\(\s*(cu\w+)\(", (here / "driver.c").read_text())
    )
    exported = ctypes.CDLL(str(library))
    assert "cuModuleLoadData" in called and [name for name in called if not hasattr(exported, name)] == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a driver is loaded")
def test_tritons_launchers_take_what_later_calls_give_them(tmp_path):
    """Kernels that are compiled for a GPU, and the launchers of this version of Triton."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, bench_calls.__file__, "--profile", "triton:draft"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^ *{10 * bench_calls.CALLS} .*\Wkinds\.py:\d+\(launch\)$", done.stdout, re.MULTILINE)
