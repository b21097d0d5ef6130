"""The machine code of kernels in csrc/cuda/ and csrc/layers/cuda/, which needs nvcc but no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from . import ROOT, sass
from .ptxas import NVCC, ptxas_report

FLAGS = ("-O3", "-std=c++20", "-cubin", "-lineinfo", "-Xptxas", "-v")


@dataclass(frozen=True)
class Kernel:
    name: str
    registers: int
    spilled: int  # bytes
    blocks: list[sass.Block]

    @property
    def instructions(self) -> list[sass.Instruction]:
        return [i for block in self.blocks for i in block.instructions]


def disassembler() -> str:
    """nvdisasm of the toolkit, or the one that Triton brings along."""
    import triton

    brought = Path(triton.__file__).parent / "backends/nvidia/bin"
    found = shutil.which("nvdisasm", path=f"{os.environ['PATH']}:/usr/local/cuda/bin:{brought}")
    assert found, "no nvdisasm, neither a toolkit's nor Triton's"
    return found


def compiled(kernels: list[str], architecture: str, folder: Path) -> dict[str, Kernel]:
    """Some of these kernels, such as "sums_kernel<Any>(StepWork)", by these names."""
    source, cubin = folder / "kernels.cu", folder / "kernels.cubin"
    asked = [k.replace("(", "(const __grid_constant__ ") for k in kernels]
    lines = [f'#include "{ROOT}/csrc/{header}.h"' for header in ("cuda/stages", "layers/cuda/linear")]
    lines.append("using namespace specdec::cuda;")
    source.write_text("\n".join([*lines, *(f"template __global__ void specdec::cuda::{k};" for k in asked), ""]))
    told = subprocess.run(
        [NVCC, *FLAGS, f"-arch={architecture}", source, "-o", cubin], check=True, capture_output=True, text=True
    )
    listing = subprocess.run([disassembler(), "-c", "-gi", cubin], check=True, capture_output=True, text=True)
    found = {}
    reports = {str(k["kernel"]): k for k in ptxas_report(told.stdout + told.stderr)}
    for mangled, blocks in sass.kernels(listing.stdout).items():
        whole = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
        of_kernel = reports[whole.split("(")[0]]
        spilled = int(str(of_kernel["spill_stores"])) + int(str(of_kernel["spill_loads"]))
        name = whole.removeprefix("void ").replace("specdec::cuda::", "").replace(" >", ">")
        found[name] = Kernel(name, int(str(of_kernel["registers"])), spilled, blocks)
    assert found.keys() == set(kernels)
    return found
