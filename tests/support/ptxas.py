"""nvcc, and what its assembler reports of every kernel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

NVCC = shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin:{os.environ['PATH']}")


def ptxas_report(log: str) -> list[dict[str, object]]:
    """Registers, stack, spills and shared memory (bytes) of every kernel, from what `ptxas -v` printed."""
    kernels: list[dict[str, object]] = []
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            kernels.append({"kernel": entry[1], "architecture": entry[2]})
        elif kernels and (memory := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", line)):
            for name, value in zip(("stack", "spill_stores", "spill_loads"), memory.groups(), strict=True):
                kernels[-1].setdefault(name, int(value))  # later ones are of functions that it calls
        elif kernels and (used := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            kernels[-1] |= {"registers": int(used[1]), "static_shared": int(shared[1]) if shared else 0}
    if kernels and shutil.which("c++filt"):
        command = ["c++filt", *(str(k["kernel"]) for k in kernels)]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for kernel, name in zip(kernels, names.splitlines(), strict=True):
            kernel["kernel"] = name.split("(")[0]
    return kernels
