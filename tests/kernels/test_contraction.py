"""Bias and penalties round after each operation, in the code that compilers make of them. With one operation for a
product and a sum, which rounds once, other tokens would be kept than in ``reference``."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import ROOT
from support.ptxas import NVCC

HAS_FMA = "fma" in (Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else ())
CODE = """
#include "core/distribution.h"
extern "C" {qualifiers} void adjusted(const float* x, const int* count, int n, float* out) {{
  for (int i = {first}; i < n; i += {step}) {{
    out[i] = specdec::adjust(x[i], 0.3f, count[i] == 0, count[i], {{1.3f, 0.7f, 0.2f}});
  }}
}}
"""


def compiled(folder: Path, command: list[str], suffix: str, **parts: str) -> Path:
    source, made = folder / f"adjusted{suffix}", folder / "adjusted.out"
    source.write_text(CODE.format(**parts))
    subprocess.run([*command, f"-I{ROOT / 'csrc'}", source, "-o", made], check=True)
    return made


@pytest.mark.skipif(not HAS_FMA, reason="this CPU has no fused multiply-add")
def test_a_host_with_fused_operations(tmp_path):
    command = ["c++", "-O3", "-std=c++20", "-shared", "-fPIC", "-mfma", "-mavx2", "-ffp-contract=fast"]
    library = ctypes.CDLL(compiled(tmp_path, command, ".cpp", qualifiers="", first="0", step="1"))
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 4
    count, out = torch.arange(len(x), dtype=torch.int32) % 4, torch.empty_like(x)
    library.adjusted(*(ctypes.c_void_p(t.data_ptr()) for t in (x, count)), len(x), ctypes.c_void_p(out.data_ptr()))
    assert torch.equal(out, expected(x, count))


def expected(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """In the order of ``reference``, one operation after the other."""
    x = x + 0.3
    x = torch.where(x < 0, x * torch.tensor(1.3), x / torch.tensor(1.3))
    return torch.where(count > 0, x - torch.tensor(0.7) - torch.tensor(0.2) * count, x)


def check_ptx(ptx: str) -> None:
    """Every product of floats is a fused operation that adds 0, so that nothing else can be added in it."""
    fused = re.findall(r"fma\.rn(?:\.ftz)?\.f32\s+(?:[^,]+,){3}\s*([^;]+);", ptx)
    constants = dict(re.findall(r"mov\.f32\s+(%f\d+), (0f[0-9A-F]{8});", ptx))
    assert len(fused) >= 2 and {constants.get(added, added) for added in fused} == {"0f00000000"}, fused
    assert not re.search(r"\bmul(?:\.\w+)*\.f32\b", ptx)


@pytest.mark.nvcc
@pytest.mark.skipif(NVCC is None, reason="nvcc is not there")
def test_nvcc(tmp_path):
    parts = {"first": "threadIdx.x", "step": "blockDim.x", "qualifiers": "__global__"}
    check_ptx(compiled(tmp_path, [NVCC, "-O3", "-std=c++20", "-ptx", "-arch=sm_90"], ".cu", **parts).read_text())


def test_triton():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.adjusted_triton"]
    check_ptx(subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout)
