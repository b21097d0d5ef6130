"""A model of how long a step takes on a GPU, from what its kernels were counted to do. It is no measurement: a number
that is not counted is a constant of this file or of specdec.evaluation.gpus, with its source, or assumed.

    time = launches + the slower of memory and instructions, for measuring and for what follows
           + the latency of the first load of both + barriers + the draw

Sequences run in waves if not all of them fit at once, and each wave has its own latencies, barriers and draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdec.evaluation import gpus
from specdec.evaluation.gpus import REACHED, Gpu

BLOCK, BYTES = 1024, 2048  # of a block of bfloat16 logits


GPUS = tuple(gpu for gpu in gpus.GPUS if gpu.architecture.startswith("sm_"))  # for which there are CUDA kernels
# Of a multiprocessor, in a cycle (CUDA's guide): instructions of warps, and results of MUFU.
SCHEDULERS, EXPONENTIALS = 4, 16
FROM_L2 = 2.0  # times the bandwidth of device memory; assumed
BYTES_A_CYCLE = 64  # that a multiprocessor takes from the L2 cache; published measurements of A100 and H100
ISSUE_GAP = 2.0  # cycles between two instructions of a warp that does not wait for memory; assumed
LAUNCH = 2.0e-6  # of a kernel in a graph; assumed
NEXT_LAUNCH = 1.0e-6  # of one that begins when another one ends; assumed
LATENCY = 0.7e-6  # of a load from device memory; published measurements are 0.6 to 0.8
CLUSTER_BARRIER = 0.3e-6  # with the writes to other blocks that it waits for; assumed
BLOCK_BARRIER = 0.03e-6  # about 50 cycles; assumed
ADDITIONS_A_CYCLE = 1.0  # to shared memory, of a multiprocessor, as neighbours often hit one bin; assumed
DRAW = 1.0e-6  # two races by Philox, logarithms, and the outputs; assumed


@dataclass(frozen=True)
class Launch:
    """How a step runs, as csrc/cuda/plan.h says.

    Attributes:
        measuring, deciding: blocks of a sequence, in either half of the step.
        warps: of a block.
        resident: sequences that run at once.
        sharing: blocks of one multiprocessor.
    """

    launches: int
    measuring: int
    deciding: int
    warps: int
    resident: int
    sharing: int


@dataclass(frozen=True)
class Work:
    """What one sequence does, as it was counted (step_counts.py). Bytes are of logits."""

    measured: int  # blocks of logits whose statistics are computed
    measured_bytes: int
    later_bytes: int  # from device memory, or the L2 cache, after that
    later: int  # blocks of logits that are looked at after that, wherever they are
    cluster_barriers: int
    block_barriers: int
    additions: int


def bandwidth_share(gpu: Gpu, instructions: int) -> dict[str, float]:
    """Cycles of a multiprocessor for each block of logits, by what limits them, and the share of the data sheet's
    bandwidth that this allows, if enough warps hide all latencies."""
    memory = BYTES / (gpu.terabytes * 1e3 / gpu.gigahertz / gpu.multiprocessors)
    issue, exponentials = instructions / SCHEDULERS, BLOCK / EXPONENTIALS
    share = memory / max(memory, issue, exponentials)
    return {"memory": memory, "issue": issue, "exponentials": exponentials, "bandwidth_share": share}


def reading(gpu: Gpu, num_bytes: float, multiprocessors: int, from_l2: bool) -> float:
    """Seconds in which so many multiprocessors read."""
    whole = gpu.terabytes * 1e12 * REACHED * (FROM_L2 if from_l2 else 1.0)
    return num_bytes / min(whole, multiprocessors * BYTES_A_CYCLE * gpu.gigahertz * 1e9)


def computing(gpu: Gpu, blocks: float, instructions: int, multiprocessors: int, warps: int) -> float:
    """Seconds in which so many multiprocessors, with so many warps each, compute statistics of blocks of logits."""
    issue = instructions / SCHEDULERS * max(1.0, ISSUE_GAP * SCHEDULERS / warps)
    cycles = blocks / multiprocessors * max(issue, BLOCK / EXPONENTIALS)
    return cycles / (gpu.gigahertz * 1e9)


def step_seconds(gpu: Gpu, batch: int, launch: Launch, work: Work, instructions: int) -> dict[str, float]:
    """The predicted time of a step, by part, and ``total``. ``instructions``: for a block of logits."""
    waves = math.ceil(batch / launch.resident)
    at_once, warps = min(batch, launch.resident), launch.warps * launch.sharing
    busy = [
        min(gpu.multiprocessors, math.ceil(at_once * blocks / launch.sharing))
        for blocks in (launch.measuring, launch.deciding)
    ]
    again_from_l2 = batch * work.measured_bytes < gpu.l2_megabytes << 20
    memory = [
        reading(gpu, batch * work.measured_bytes, busy[0], False),
        reading(gpu, batch * work.later_bytes, busy[1], again_from_l2),
    ]
    compute = [
        computing(gpu, batch * blocks, instructions, multiprocessors, warps)
        for blocks, multiprocessors in zip((work.measured, work.later), busy, strict=True)
    ]
    compute[1] += batch * work.additions / (busy[1] * ADDITIONS_A_CYCLE * gpu.gigahertz * 1e9)
    found = {
        "launches": LAUNCH + (launch.launches - 1) * NEXT_LAUNCH,
        "measuring": max(memory[0], compute[0]),
        "later": max(memory[1], compute[1]),
        "latency": waves * 2 * LATENCY,
        "barriers": waves * (work.cluster_barriers * CLUSTER_BARRIER + work.block_barriers * BLOCK_BARRIER),
        "draw": waves * DRAW,
    }
    return found | {"total": sum(found.values()), "memory": sum(memory), "instructions": sum(compute)}
