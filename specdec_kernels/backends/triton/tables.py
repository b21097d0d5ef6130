"""Launch tables: the number of warps of each kernel, by family of GPUs. Importing this neither times nor asks a driver.

On an H200 those of ``measure_kernel`` and ``decide_kernel`` were measured (bench/results/h200/lease.json), also how
many blocks a program of the first has and how many one of the second weighs at once. The other numbers follow from tile
sizes and from the registers that ahead-of-time compilation reports: a kernel that reads blocks of 1024 logits gets 128
threads, each of which loads 8 logits, 16 bytes in bfloat16, at once; one that reads more gets 256, the fewest with
which no register spills. ``tests/support/compile_triton.py`` prints the registers, and a test fails if one
spills.

The numbers must not depend on anything that differs between calls with one model, such as B or K: they determine the
order in which sums are rounded, and the emitted tokens must not change with B or K. How many blocks a program measures
does not, since one warp sums up each, nor how many rows are examined at once, since their masses are added as integers.
No kernel has a loop that Triton would pipeline, so there is no number of stages to choose.
"""

from __future__ import annotations

import functools

import torch

# Compute capability 8 and below, 9, 10 and above; AMD, whose warps have 64 lanes.
FAMILIES = ("ampere", "hopper", "blackwell", "amd")

# fmt: off
WARPS = {
    "measure_kernel":         (1, 1, 1, 1),
    "select_kernel":          (4, 4, 4, 2),
    "select_flat_kernel":     (16, 16, 16, 8),
    "race_kernel":            (4, 4, 4, 2),
    "sums_kernel":            (8, 8, 8, 4),
    "decide_kernel":          (8, 8, 8, 4),
    "decide_draft_kernel":    (8, 8, 8, 4),
    "decide_tree_kernel":     (8, 8, 8, 4),
    "first_children_kernel":  (4, 4, 4, 2),
    "decide_children_kernel": (4, 4, 4, 2),
}
# Where a table's registers, or those of a race or a mask, do not fit in as few.
WARPS_WITH_TABLE = {
    "measure_kernel":         (4, 4, 4, 2),
}
# Registers of a thread, where fewer than the assembler would take let more programs run at a time; or as many as there
# are, where few programs run, and it would spill some to fit one more on a multiprocessor.
REGISTERS = {"measure_kernel": 80, "decide_kernel": 255, "decide_tree_kernel": 255}
# The first kernel of an operation, and those that come later (dependent.py).
FIRST = {"measure_kernel"}
LATER = {"select_kernel", "select_flat_kernel", "race_kernel", "sums_kernel", "decide_kernel", "decide_draft_kernel",
         "decide_tree_kernel", "first_children_kernel", "decide_children_kernel"}
# fmt: on

overrides: dict[str, int] = {}  # numbers of warps, by kernel, while others are timed (kinds.py)


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
    num_warps = overrides.get(kernel) or warps[FAMILIES.index(its_family)]
    chosen: dict[str, int] = {"num_warps": num_warps}
    dependent = its_family in ("hopper", "blackwell")
    if kernel in LATER or kernel in FIRST:
        chosen["DEPENDENT"] = dependent
    if kernel in LATER and dependent:
        chosen["launch_pdl"] = True
    if its_family == "amd":
        return chosen
    if (registers := 255 if table else REGISTERS.get(kernel)) is not None:  # a table's search takes many
        chosen["maxnreg"] = min(registers, 65536 // (32 * num_warps))  # there are 65536 for all threads together
    return chosen


def blocks_of_a_program(blocks: int, more: int) -> int:
    """How many blocks a program of ``measure_kernel`` has, if there are so many for all of them together. On an H200,
    one is best for 756 blocks, 2 for 6,000 and 4 for 36,000. ``more``: how often the registers for so many again are
    taken."""
    return min(1 if blocks <= 2048 else 2 if blocks <= 12288 else 4, max(4 >> more, 1))


def parts_at_once(kernel: str, table: bool) -> int:
    """How many parts of 128 logits ``kernel`` reads at once, which changes no result."""
    return (8 if table else 16) if kernel == "select_kernel" else (16 if table else 32)


def visits_at_once(blocks: int, table: bool, looks_up: bool) -> int:
    """How many blocks of a residual a program weighs at once, if a row has so many: fewer where every token of them is
    searched in a ``TokenTable``, or looked up in a reduced vocabulary or a mask."""
    return 1 if table else min(blocks, 2 if looks_up else 8 if blocks <= 128 else 16)


def rows_at_once(rows: int, blocks: int) -> int:
    """How many rows of a step a program examines at once, a power of 2. Few drafts are followed by more than 8."""
    return min(1 << (rows - 1).bit_length(), 8, max(1, 2048 // blocks))
