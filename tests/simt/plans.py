"""How csrc/cuda/plan.h would launch a step on GPUs that this machine does not have."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from . import kernels

MOST_BLOCKS = 16  # kMostBlocks


class Machine(ctypes.Structure):
    _fields_ = [
        ("multiprocessors", ctypes.c_int), ("has_clusters", ctypes.c_bool), ("shared_memory", ctypes.c_int64),
        ("half_of_it", ctypes.c_int64), ("places", ctypes.c_int * (MOST_BLOCKS + 1)),
    ]  # fmt: skip


class Plan(NamedTuple):
    blocks: int
    threads: int
    num_slots: int
    shared: int
    stay: int


def machine(groups: list[int], shared: int, of_multiprocessor: int, most_blocks: int) -> Machine:
    """A GPU. ``groups``: numbers of multiprocessors; a cluster must lie within one group."""
    places = [0, *(sum(n // blocks for n in groups) if blocks <= most_blocks else 0 for blocks in range(1, 17))]
    half = of_multiprocessor // 2 - 1024
    return Machine(sum(groups), True, shared, half, (ctypes.c_int * len(places))(*places))


# As its driver told: of clusters of four blocks, fewer run at once than sequences are in a usual batch.
H200 = Machine(132, True, 232448, 233472 // 2 - 1024)
H200.places[:] = [0, 132, 66, 39, 30, 22, 17, 15, 15, 9, *[7] * 7]
MACHINES = {
    "H200": H200,
    "B200": machine([18] * 7 + [22], 232448, 233472, 16),
    "sm_120": machine([12] * 14, 101376, 102400, 8),
    "A100": Machine(108, False),
}


def step(
    batch: int, k: int, vocabulary: int, dtype: str = "bfloat16", rule: int = 0, **sampling: int
) -> kernels.SpeculativeStepParams:
    """A step's parameters. ``weighed``: with draft logits but without draft_stats; ``filters``, ``table``: with
    these."""
    rows = kernels.LogitRows(1 << 20, kernels.DTYPES[getattr(torch, dtype)], 0, 0, vocabulary)
    element = 4 if dtype == "float32" else 2
    rows.row_stride, rows.sequence_stride = element * vocabulary, element * vocabulary * (k + 1)
    params = kernels.SpeculativeStepParams(
        target=rows, batch=batch, num_drafts_max=k, vocabulary=vocabulary, rule=rule, draft_lse=1 << 20
    )
    params.draft = rows
    if sampling.get("weighed"):
        params.draft_lse = None
    params.sampling.filters = 1 << 20 if sampling.get("filters") else None
    params.sampling.has_table = bool(sampling.get("table"))
    if sampling.get("log_probs"):
        params.log_probs = 1 << 20
    return params


def plan(on: str, *shape: object, measured: bool = False, **sampling: int) -> Plan:
    """``measured``: of the second of two launches."""
    params = step(*shape, **sampling)
    out = (ctypes.c_int64 * len(Plan._fields))()
    kernels.library().plan(ctypes.byref(params), ctypes.byref(MACHINES[on]), measured, out)
    return Plan(*out)
