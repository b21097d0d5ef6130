"""Counts the instructions of the CUDA kernels' measuring loop, and the barriers that a step meets, in their machine
code. Predicts from them, and from what a step does besides, how long the goals' steps take. Needs no GPU.

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
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import report
import sass
import torch
import typer
from predicted_times import BLOCK, GPUS, SCHEDULERS, bandwidth_share
from ptxas import NVCC, ptxas_report
from step_counts import predictions

SOURCES = ("speculative_step", "draft_step", "verify_tree", "draft_children")
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
# Of fused kernels; of the others, they stay or come through the ring.
NEAR = {"speculative_rows_kernel": ("stay",), "verify_tree_kernel": ("stay", "in place")}


def _within(*functions: str) -> Callable[[sass.Block], bool]:
    return lambda block: any(all(map(i.within, functions)) for i in block.instructions)


# What the shortest run of a fused kernel goes through, without filters: a step (rule `token`) that rejects a draft, and
# a draft. Steps that are decided row by row meet a barrier for each row.
RUNS = {
    "speculative_step_kernel": (*ORIGINS["stay"], _within("walk", "publish"), _within("write_step")),
    "draft_step_kernel": (*ORIGINS["stay"], _within("draw_by"), _within("write_draft")),
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
LOGITS = 32  # of a block that a thread has
FILTERED, LISTED = 128_256, 4096  # logits of a row, and of a full list (kListed of csrc/cuda/select.h)


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


def histogram_turn(kernel: Kernel) -> int:
    """The instructions that a filter's histogram of the row takes for 1,024 logits that are already loaded, all of them
    in its interval; 0 if the kernel has none. Its loop is unrolled, so each logit's are those between one addition of
    low halves and the next."""
    every = [i for block in kernel.blocks for i in block.instructions]
    additions = [at for at, i in enumerate(every) if i.name in ("ATOM", "ATOMS") and i.within("add")]
    # Of each logit in turn, the low and the high half; the list's logits have two more additions elsewhere.
    for begin in range(len(additions) - 2 * LOGITS + 1):
        low_halves = additions[begin : begin + 2 * LOGITS : 2]
        steps = [after - before for before, after in pairwise(low_halves)]
        if max(steps) <= 2 * min(steps):
            return LOGITS * (low_halves[-1] - low_halves[0]) // (LOGITS - 1)
    return 0


def predicted_filter(architecture: str, instructions: int) -> dict[str, dict[str, float]]:
    """Microseconds for the histogram of a row, by one multiprocessor and issue alone: a model, not a measurement. Flat:
    all logits are candidates. Peaked: as many as the list holds, which are counted from there."""
    found = {}
    for gpu in (g for g in GPUS if g.architecture == architecture):
        each = instructions / SCHEDULERS / gpu.gigahertz / 1e3
        found[gpu.name] = {"flat": each * FILTERED / BLOCK, "peaked": each * LISTED / BLOCK}
    return found


def barriers(kernel: Kernel) -> dict[str, int]:
    """How often threads wait for their cluster and for their block in the run of RUNS, and the fences that wait for
    memory."""

    def without_cluster(block: sass.Block) -> bool:
        """Whether the compiler added the block to a cluster's barrier for launches that have no clusters."""
        added = (i for i in block.instructions if i.name in ("BAR", "NOP"))
        return any(i.within(half) for i in added for half in ("arrive_cluster", "wait_cluster"))

    run = sass.shortest_run(kernel.blocks, RUNS[kernel.name], without_cluster)
    return {
        "cluster_barriers": sum(i.name == "UCGABAR_WAIT" for i in run),
        "fences": sum(i.opcode == "MEMBAR.ALL.GPU" for i in run),
        "block_barriers": sum(i.name == "BAR" for i in run),
    }


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
    if turn := histogram_turn(kernel):
        found["histogram"] = turn
        found["histogram of 128,256 logits, predicted"] = predicted_filter(kernel.architecture, turn)
    fused = kernel.architecture != "sm_80" and "measure" not in kernel.name
    for origin in NEAR.get(kernel.name, ("stay", "ring")) if fused else ("in place",):
        if path := measuring_turn(kernel, origin):
            found[origin] = {"all": len(path), **Counter(map(kind_of, path))}
            on = (gpu for gpu in GPUS if gpu.architecture == kernel.architecture)
            found[f"{origin}, predicted"] = {gpu.name: bandwidth_share(gpu, len(path)) for gpu in on}
    return found | (barriers(kernel) if fused and kernel.name in RUNS else {})


def instructions_of(rows: list[dict]) -> dict[str, int]:
    """For a block of logits of a target's row, by where it comes from."""
    fused = "speculative_step_kernel"
    kernels = {"stay": (fused, "stay"), "ring": (fused, "ring"), "rows": ("speculative_rows_kernel", "stay")}
    kernels["in place"] = ("speculative_measure_kernel", "in place")
    return {
        name: row[origin]["all"]
        for name, (kernel, origin) in kernels.items()
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
    met = ("cluster_barriers", "fences", "block_barriers")
    fused = [{name: row[name] for name in ("kernel", "architecture", *met)} for row in results.rows if met[0] in row]
    results.show("barriers and fences that a step meets", fused, ("kernel", "architecture", *met))
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
