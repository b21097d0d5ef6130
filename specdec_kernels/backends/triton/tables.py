"""Launch tables: how a program of each kernel is laid out, by GPU. Nothing is timed or asked of a driver at import.

Chosen from tile sizes and from what compiling ahead of time says of registers, not measured: no GPU could be had. What
reads blocks of 1024 logits gets 128 threads, 8 logits and so one load of 16 bytes (bfloat16) each; what reads 4096 gets
256, the fewest that spill no register with penalties and filters together. ``tests/support/compile_triton.py`` prints
the registers, a test lets none spill, and ``bench/tune_triton.py`` times others on a GPU.

A number depends on nothing that differs between two calls with one model, such as B or K: sums round in an order that
follows from it, and tokens must not. There are no stages to choose, as no loop here is one that Triton pipelines.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Compute capability up to 8, 9, from 10 on; AMD, where a warp has 64 lanes.
FAMILIES = ("ampere", "hopper", "blackwell", "amd")

# fmt: off
WARPS = {
    "stats_kernel":        (4, 4, 4, 2),
    "filter_kernel":       (8, 8, 8, 4),
    "residual_kernel":     (4, 4, 4, 2),
    "race_kernel":         (4, 4, 4, 2),
    "draft_draw_kernel":   (4, 4, 4, 2),
    "draft_race_kernel":   (4, 4, 4, 2),
    "compact_draw_kernel": (8, 8, 8, 4),
}
# fmt: on

_overrides: dict[str, int] = {}


@functools.cache
def family(device: torch.device) -> str:
    if device.type != "cuda":
        return FAMILIES[0]  # the interpreter, which has no warps
    if torch.version.hip is not None:
        return "amd"
    major, _ = torch.cuda.get_device_capability(device)
    return "ampere" if major < 9 else "hopper" if major == 9 else "blackwell"


def options(kernel: str, device: torch.device, table: bool) -> dict[str, int]:
    """What a launch of this kernel is given besides its arguments; ``table``: whether the distribution has one."""
    its_family = family(device)
    num_warps = _overrides.get(kernel) or WARPS[kernel][FAMILIES.index(its_family)]
    if its_family == "amd" or not table:
        return {"num_warps": num_warps}
    # Searching a table takes registers, of which NVIDIA's assembler then spills a few to fit one more program on a
    # multiprocessor, unless it is told how many a thread may have: 255 at most, and all threads together 65536.
    return {"num_warps": num_warps, "maxnreg": min(255, 65536 // (32 * num_warps))}


@contextmanager
def using(kernel: str, num_warps: int) -> Iterator[None]:
    """Another number than the table's, to time it."""
    _overrides[kernel] = num_warps
    try:
        yield
    finally:
        del _overrides[kernel]
