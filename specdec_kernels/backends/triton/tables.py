"""Launch tables: the number of warps of each kernel, by family of GPUs. Importing this neither times nor asks a driver.

The numbers follow from tile sizes and from the registers that ahead-of-time compilation reports. Of them only those of
``stats_kernel`` on Hopper were measured: on an H200 one warp for a block takes half the time of four. Else a kernel
that reads blocks of 1024 logits gets 128 threads, each of which loads 8 logits, 16 bytes in bfloat16, at once. One that
reads 4096 logits gets 256 threads, the fewest with which no register spills when penalties and filters are both on.
``tests/support/compile_triton.py`` prints the registers, a test fails if one spills, and ``bench/tune_triton.py`` times
other numbers on a GPU.

The numbers must not depend on anything that differs between calls with one model, such as B or K: they determine the
order in which sums are rounded, and the emitted tokens must not change with B or K. Those of kernels that merge a row's
blocks, in a draft and in a step, are the same, so that both have the same q to the last bit. No kernel has a loop that
Triton would pipeline, so there is no number of stages to choose.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Compute capability 8 and below, 9, 10 and above; AMD, whose warps have 64 lanes.
FAMILIES = ("ampere", "hopper", "blackwell", "amd")

# fmt: off
WARPS = {
    "stats_kernel":       (4, 1, 4, 2),
    "filter_kernel":      (8, 8, 8, 4),
    "race_kernel":        (4, 4, 4, 2),
    "examine_kernel":     (4, 4, 4, 2),
    "residual_kernel":    (4, 4, 4, 2),
    "draft_draw_kernel":  (4, 4, 4, 2),
    "draft_race_kernel":  (4, 4, 4, 2),
    "children_kernel":    (4, 4, 4, 2),
    "verify_tree_kernel": (8, 8, 8, 4),
    "conv_window_kernel": (1, 1, 1, 1),
    "delta_step_kernel":  (4, 4, 4, 2),
    "ssd_step_kernel":    (4, 4, 4, 2),
    "store_kernel":       (4, 4, 4, 2),
}
# Where a table's registers do not fit in as few. Only a kernel whose sums are the same with any number may be here.
WARPS_WITH_TABLE = {
    "stats_kernel":       (4, 4, 4, 2),
}
# fmt: on

_overrides: dict[str, int] = {}


@functools.cache
def family(device: torch.device) -> str:
    if device.type != "cuda":
        return FAMILIES[0]  # any: Triton's interpreter has no warps
    if torch.version.hip is not None:
        return "amd"
    major, _ = torch.cuda.get_device_capability(device)
    return "ampere" if major < 9 else "hopper" if major == 9 else "blackwell"


def options(kernel: str, device: torch.device, table: bool) -> dict[str, int]:
    """Options for the launch of ``kernel``. ``table``: whether there is a ``TokenTable``, or as much in registers."""
    its_family = family(device)
    warps = WARPS_WITH_TABLE.get(kernel, WARPS[kernel]) if table else WARPS[kernel]
    num_warps = _overrides.get(kernel) or warps[FAMILIES.index(its_family)]
    if its_family == "amd" or not table:
        return {"num_warps": num_warps}
    # Searching a table takes many registers. NVIDIA's assembler would spill a few of them to fit one more program on a
    # multiprocessor, unless it is told how many a thread may have: at most 255, and 65536 for all threads together.
    return {"num_warps": num_warps, "maxnreg": min(255, 65536 // (32 * num_warps))}


@contextmanager
def using(kernel: str, num_warps: int) -> Iterator[None]:
    """Launches ``kernel`` with another number of warps than the table's, to time it."""
    _overrides[kernel] = num_warps
    try:
        yield
    finally:
        del _overrides[kernel]
