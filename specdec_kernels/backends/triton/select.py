"""The launch ``select``: the cutoff of top-k, top-p and min-p. One program per row, without sorting.

Both the k-th largest logit and the cutoff of top-p are found by bisection over the integers of ``ordered_key``. Each
pass over the row measures how much lies at or above the middle, and moves one bound to a logit that exists, so a row
takes about log2(number of its different logits) passes. A float32 sum of non-negative numbers in a fixed order never
falls when a number is added, whatever the rounding: so bisection finds exactly the cutoff that float32 sums define.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .core import BLOCK, INFINITY, from_ordered_key, inverse, min_p_cutoff, ordered_key, row_fault, weight
from .dependent import let_next_begin, wait_for_earlier
from .rows import is_drafted_from, load_limit, load_tokens, stats_row

GROUP = tl.constexpr(4)  # blocks that a pass reads at once; with 8, registers would spill
LOWEST = tl.constexpr(-2139095041)  # ordered_key(-inf)


@triton.jit
def load_group_max(rows, b, j, group, SIZE: tl.constexpr):
    """[SIZE] largest logits, one for each block of the group."""
    block = group * SIZE + tl.arange(0, SIZE)
    at = stats_row(rows, b, j) * rows.num_blocks + block
    return tl.load(rows.max_ptr + at, mask=block < rows.num_blocks, other=-INFINITY)


@triton.jit
def load_group(rows, b, j, group, SIZE: tl.constexpr):
    """[SIZE * 1024] adjusted logits of the group's blocks."""
    return load_tokens(rows, b, j, tl.cast(group, tl.int32) * (SIZE * BLOCK) + tl.arange(0, SIZE * BLOCK))


@triton.jit
def weigh(rows, b, j, low, middle, largest, inverse_temperature, COUNT: tl.constexpr):
    """(the weight of the tokens whose key is at least ``middle``, or with COUNT their number; the smallest of these
    keys; the largest key below ``middle``). Blocks whose keys are all below ``low`` are skipped."""
    mass = tl.zeros([GROUP * BLOCK], tl.float32)
    above = tl.full([GROUP * BLOCK], 0x7FFFFFFF, tl.int32)
    below = tl.full([GROUP * BLOCK], LOWEST, tl.int32)
    for group in range(0, tl.cdiv(rows.num_blocks, GROUP)):
        if tl.max(ordered_key(load_group_max(rows, b, j, group, GROUP)), 0) >= low:
            x = load_group(rows, b, j, group, GROUP)
            key = ordered_key(x)
            w = 1.0 if COUNT else weight(x, largest, inverse_temperature)
            mass += tl.where(key >= middle, w, 0.0)
            above = tl.where(key >= middle, tl.minimum(above, key), above)
            below = tl.where(key < middle, tl.maximum(below, key), below)
    return tl.sum(mass, 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit
def bisect(rows, b, j, low, high, wanted, largest, inverse_temperature, COUNT: tl.constexpr):
    """The largest key in low .. high such that the tokens at or above it weigh at least ``wanted``. Those at or above
    ``low`` must."""
    while low < high:
        middle = ((low.to(tl.int64) + high + 1) >> 1).to(tl.int32)
        mass, above, below = weigh(rows, b, j, low, middle, largest, inverse_temperature, COUNT)
        high = tl.where(mass >= wanted, high, tl.maximum(low, below))
        low = tl.where(mass >= wanted, above, low)
    return low


@triton.jit
def nth_largest(rows, b, j, low, n, largest):
    """The key of the n-th largest of the logits whose keys are at least ``low``; of the smallest if there are fewer
    than n. Logits of -inf do not count."""
    one = tl.full([], 1.0, tl.float32)
    low = tl.maximum(low, LOWEST + 1)
    number, smallest, below = weigh(rows, b, j, low, low, largest, one, True)
    return bisect(rows, b, j, smallest, ordered_key(largest), tl.minimum(number, n), largest, one, True)


@triton.jit
def cutoff_of(rows, b, j, largest, temperature):
    """The smallest logit that top-k, then top-p, then min-p keep."""
    at = rows.sampling.filters_ptr + b * 3
    top_k, top_p, min_p = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    low, inverse_temperature = tl.full([], LOWEST, tl.int32), inverse(temperature)
    if top_k > 0.0:
        low = nth_largest(rows, b, j, low, top_k, largest)
    if top_p < 1.0:
        total, above, below = weigh(rows, b, j, low, low, largest, inverse_temperature, False)
        wanted = tl.maximum(top_p * total, 1.1754944e-38)  # top_p = 0 keeps the largest logit
        low = bisect(rows, b, j, low, ordered_key(largest), wanted, largest, inverse_temperature, False)
    return tl.maximum(from_ordered_key(low), min_p_cutoff(largest, temperature, min_p))


@triton.jit
def select_row(rows, b, j, BLOCKS: tl.constexpr):
    """Stores the cutoff of row (b, j) and the block sums of the tokens it keeps."""
    row = stats_row(rows, b, j)
    temperature = tl.load(rows.sampling.temperature_ptr + b)
    block = tl.arange(0, BLOCKS)
    block_max = tl.load(rows.max_ptr + row * rows.num_blocks + block, mask=block < rows.num_blocks, other=-INFINITY)
    largest = tl.max(block_max, 0)
    any_nan = tl.max((block_max != block_max).to(tl.int32), 0) > 0
    cutoff = tl.full([], -INFINITY, tl.float32)
    if (temperature != 0.0) & (row_fault(largest) == 0) & (any_nan == 0):
        cutoff = cutoff_of(rows, b, j, largest, temperature)
    tl.store(rows.cutoff_ptr + row, cutoff)
    if cutoff > -INFINITY:
        for group in range(0, tl.cdiv(rows.num_blocks, GROUP)):
            its_max = load_group_max(rows, b, j, group, GROUP)
            total = tl.zeros([GROUP], tl.float32)
            if tl.max(its_max, 0) >= cutoff:
                x = load_group(rows, b, j, group, GROUP)
                x = tl.reshape(x, [GROUP, BLOCK])
                w = weight(x, its_max[:, None], inverse(temperature))
                total = tl.sum(tl.where(x >= cutoff, w, 0.0), 1)
            its_block = group * GROUP + tl.arange(0, GROUP)
            tl.store(rows.sum_ptr + row * rows.num_blocks + its_block, total, mask=its_block < rows.num_blocks)


@triton.jit(do_not_specialize=["first_row"])
def select_kernel(
    target,  # Rows; one program for each row that may be needed, as in ``measure``
    draft,  # Rows, or NO_ROWS
    num_drafts_ptr,  # [B] or None
    num_rows,
    first_row,
    BLOCKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (sequence, row)."""
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    b, i = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if i < num_rows:
        if i <= load_limit(num_drafts_ptr, b, num_rows - 1):
            select_row(target, b, i + first_row, BLOCKS)
    elif draft.ptr is not None:
        i -= num_rows
        if is_drafted_from(draft, b, i, load_limit(num_drafts_ptr, b, num_rows - 1)):
            select_row(draft, b, i + first_row, BLOCKS)
