"""Counts the instructions of the CUDA kernels' measuring loop in their machine code, and predicts from them, and from
what a step does besides, how long the goals' steps take. Needs no GPU.

    python bench/machine_code.py --json bench/results/machine_code.json

README.md says what is counted, and how.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import report
import sass
import torch
import typer
from predicted_times import GPUS, bandwidth_share
from ptxas import NVCC, ptxas_report
from step_counts import predictions

SOURCES = ("speculative_step", "draft_step")
FLAGS = ("-O3", "-std=c++20", "-cubin", "-lineinfo", "-Xptxas", "-v")


def _has(pattern: str) -> Callable[[sass.Block], bool]:
    return lambda block: any(re.match(pattern, i.opcode) for i in block.instructions)


# What the shortest turn for a whole block of bfloat16 logits runs through.
MAXIMUM, EXPONENTIAL = _has(r"HMNMX2\.BF16"), _has(r"MUFU\.EX2")
WAIT, COPY = _has(r"SYNCS\.PHASECHK"), _has(r"UBLKCP")
# Where blocks come from: they stay in shared memory, they come through the ring, or they are read in place.
ORIGINS = {
    "stay": (MAXIMUM, EXPONENTIAL, WAIT),
    "ring": (MAXIMUM, EXPONENTIAL, WAIT, COPY),
    "in place": (MAXIMUM, EXPONENTIAL),
}


@dataclass(frozen=True)
class Kind:
    """Instructions are of the first kind that fits."""

    name: str
    names: frozenset[str] = frozenset()  # of the operation
    functions: frozenset[str] = frozenset()  # in which, or in what these call
    lines: str = "$."  # a pattern of the innermost line

    def fits(self, instruction: sass.Instruction) -> bool:
        if instruction.name in self.names or any(map(instruction.within, self.functions)):
            return True
        return bool(instruction.places) and re.search(self.lines, instruction.places[0].text) is not None


KINDS = (
    Kind("shuffles", frozenset({"SHFL", "VOTE", "REDUX"}), frozenset({"reduce"})),
    Kind("exponential and sum", frozenset({"MUFU"}), frozenset({"weight_of", "exp2_of"}), r"\bsum \+="),
    Kind("maximum and NaN", frozenset({"FMNMX", "HMNMX2"}), frozenset({"max", "larger"}), r"INFINITY \? 0"),
    Kind("load and unpack", functions=frozenset({"load", "set", "load16", "logit"})),
)
REST = "address and bookkeeping"


ARCHITECTURES = tuple(dict.fromkeys(gpu.architecture for gpu in GPUS))


@dataclass(frozen=True)
class Kernel:
    name: str
    architecture: str
    registers: int
    spilled: int  # bytes
    blocks: list[sass.Block]


def plain_name(kernel: str) -> str:
    """A kernel's name without namespaces and arguments, from its mangled or its whole name."""
    (name,) = re.findall(r"(?:\d|::|^)([a-z_]+_kernel)", kernel)
    return name


def disassembler() -> str:
    """nvdisasm of the toolkit, or the one that Triton brings along."""
    import triton

    brought = Path(triton.__file__).parent / "backends/nvidia/bin"
    found = shutil.which("nvdisasm", path=f"{os.environ['PATH']}:/usr/local/cuda/bin:{brought}")
    return found or report.refuse("PATH", "no nvdisasm", "a CUDA toolkit, or Triton")


def compiled(source: Path, architecture: str) -> list[Kernel]:
    compiler = NVCC or report.refuse("PATH", "no nvcc", "a CUDA toolkit")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        command = [compiler, *FLAGS, f"-arch={architecture}", source, "-o", cubin]
        told = subprocess.run(command, check=True, capture_output=True, text=True)
        listing = subprocess.run([disassembler(), "-c", "-gi", cubin], check=True, capture_output=True, text=True)
    resources = {plain_name(str(k["kernel"])): k for k in ptxas_report(told.stdout + told.stderr)}
    found = []
    for mangled, blocks in sass.kernels(listing.stdout).items():
        name = plain_name(mangled)
        used = resources[name]
        spilled = int(str(used["spill_stores"])) + int(str(used["spill_loads"]))
        found.append(Kernel(name, architecture, int(str(used["registers"])), spilled, blocks))
    return found


def measuring_turn(kernel: Kernel, origin: str) -> list[sass.Instruction]:
    """The instructions that compute the statistics of a block of logits; [] if the kernel does not."""
    for loop in sass.loops(kernel.blocks):
        if turn := sass.shortest_turn(kernel.blocks, loop, ORIGINS[origin]):
            return turn
    return []


def kind_of(instruction: sass.Instruction) -> str:
    return next((kind.name for kind in KINDS if kind.fits(instruction)), REST)


def counted(kernel: Kernel) -> dict[str, object]:
    every = [i for block in kernel.blocks for i in block.instructions]
    names = Counter(i.name for i in every)
    found: dict[str, object] = {
        "kernel": kernel.name,
        "architecture": kernel.architecture,
        "registers": kernel.registers,
        "spilled_bytes": kernel.spilled,
        "instructions": len(every),
        "calls": sum(count for name, count in names.items() if name.startswith("CALL")),
        "atomic_loops": sum(i.opcode.startswith("ATOMS.CAS") for i in every),
    }
    fused = kernel.architecture != "sm_80" and "measure" not in kernel.name
    for origin in ("stay", "ring") if fused else ("in place",):
        if turn := measuring_turn(kernel, origin):
            found[origin] = {"all": len(turn), **Counter(map(kind_of, turn))}
            on = (gpu for gpu in GPUS if gpu.architecture == kernel.architecture)
            found[f"{origin}, predicted"] = {gpu.name: bandwidth_share(gpu, len(turn)) for gpu in on}
    return found


def instructions_of(rows: list[dict]) -> dict[str, int]:
    """For a block of logits of a target's row, by where it comes from."""
    kernels = {"stay": "speculative_step_kernel", "ring": "speculative_step_kernel"}
    kernels["in place"] = "speculative_measure_kernel"
    return {
        origin: row[origin]["all"]
        for origin, kernel in kernels.items()
        for row in rows
        if row["kernel"] == kernel and origin in row
    }


def main(
    architectures: Annotated[str, typer.Option(help="separated by commas")] = ",".join(ARCHITECTURES),
    json_path: report.JsonPath = None,
) -> None:
    """Counts the instructions of the measuring loop, and predicts the times of steps."""
    asked = report.read_names("architectures", architectures, ARCHITECTURES)
    results = report.Report("machine_code", torch.device("cpu"), json_path, None)
    pairs = [(report.ROOT / "csrc/cuda" / f"{source}.cu", name) for name in asked for source in SOURCES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(lambda pair: compiled(*pair), pairs):
            for kernel in found:
                results.add(counted(kernel))
    for origin in ORIGINS:
        rows = [
            {"kernel": row["kernel"], "architecture": row["architecture"], "registers": row["registers"], **row[origin]}
            for row in results.rows
            if origin in row
        ]
        if rows:
            columns = ("kernel", "architecture", "registers", "all", *(k.name for k in KINDS), REST)
            results.show(f"instructions for 1,024 bfloat16 logits, {origin}", rows, columns)
    steps = []
    for gpu in (gpu for gpu in GPUS if gpu.architecture in asked):
        of_gpu = [row for row in results.rows if row["architecture"] == gpu.architecture]
        steps += predictions(gpu, instructions_of(of_gpu))
    results.content["steps"] = steps
    shown = [{**row, **{part: 1e6 * seconds for part, seconds in row["seconds"].items()}} for row in steps]
    results.show("predicted microseconds of a step", shown, ("goal", "gpu", *steps[0]["seconds"]))
    results.finish()


if __name__ == "__main__":
    typer.run(main)
