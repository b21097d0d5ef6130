"""bench/bench_calls.py: what it times without a GPU."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
from pathlib import Path

import bench_calls
import pytest
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
