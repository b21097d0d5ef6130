"""The machine code of a file in csrc/cuda/, which needs nvcc but no GPU."""

from __future__ import annotations

import os
import re
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


def plain_name(kernel: str) -> str:
    """A kernel's name without namespaces, from its mangled or its whole name; with the numbers of a template."""
    (found,) = re.findall(r"(?:\d|::|^)([a-z_]+_kernel)(?:I((?:Li\d+E)+)E|<([\d, ]+)>)?", kernel)
    numbers = re.findall(r"\d+", found[1] + found[2])
    return found[0] + (f"<{', '.join(numbers)}>" if numbers else "")


def disassembler() -> str:
    """nvdisasm of the toolkit, or the one that Triton brings along."""
    import triton

    brought = Path(triton.__file__).parent / "backends/nvidia/bin"
    found = shutil.which("nvdisasm", path=f"{os.environ['PATH']}:/usr/local/cuda/bin:{brought}")
    assert found, "no nvdisasm, neither a toolkit's nor Triton's"
    return found


def compiled(source: str, architecture: str, folder: Path) -> list[Kernel]:
    cubin = folder / "kernels.cubin"
    command = [NVCC, *FLAGS, f"-arch={architecture}", ROOT / "csrc/cuda" / f"{source}.cu", "-o", cubin]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    listing = subprocess.run([disassembler(), "-c", "-gi", cubin], check=True, capture_output=True, text=True)
    used = {plain_name(str(k["kernel"])): k for k in ptxas_report(told.stdout + told.stderr)}
    found = []
    for mangled, blocks in sass.kernels(listing.stdout).items():
        of_kernel = used[name := plain_name(mangled)]
        spilled = int(str(of_kernel["spill_stores"])) + int(str(of_kernel["spill_loads"]))
        found.append(Kernel(name, int(str(of_kernel["registers"])), spilled, blocks))
    return found
