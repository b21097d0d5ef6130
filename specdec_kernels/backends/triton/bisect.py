"""Cutoffs of rows in which filters keep many tokens, by passes over the row.

Both the k-th largest logit and the cutoff of top-p are found by bisection over the integers of ``ordered_key``. Each
pass over the row measures how much lies at or above the middle, and moves one bound to a logit that exists, so a row
takes about log2(number of its different logits) passes. A float32 sum of non-negative numbers in a fixed order never
falls when a number is added, whatever the rounding: so bisection finds exactly the cutoff that float32 sums define.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .core import BLOCK, INFINITY, LOWEST, inverse, ordered_key, weight
from .rows import load_tokens, stats_row

GROUP = tl.constexpr(4)  # blocks that a pass reads at once; with 8, registers would spill


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
def weigh(rows, b, j, low, middle, largest, inverse_temperature, counting):
    """(the weight of the tokens whose key is at least ``middle``, or if ``counting`` their number; the smallest of
    these keys; the largest key below ``middle``). Blocks whose keys are all below ``low`` are skipped."""
    mass = tl.zeros([GROUP * BLOCK], tl.float32)
    above = tl.full([GROUP * BLOCK], 0x7FFFFFFF, tl.int32)
    below = tl.full([GROUP * BLOCK], LOWEST, tl.int32)
    for group in range(0, tl.cdiv(rows.num_blocks, GROUP)):
        if tl.max(ordered_key(load_group_max(rows, b, j, group, GROUP)), 0) >= low:
            x = load_group(rows, b, j, group, GROUP)
            key = ordered_key(x)
            w = tl.where(counting, 1.0, weight(x, largest, inverse_temperature))
            mass += tl.where(key >= middle, w, 0.0)
            above = tl.where(key >= middle, tl.minimum(above, key), above)
            below = tl.where(key < middle, tl.maximum(below, key), below)
    return tl.sum(mass, 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit
def cutoff_of_row(rows, b, j, largest, temperature, top_k, top_p):
    """The key of the smallest logit that top-k, then top-p keep. Logits of -inf do not count."""
    low, phase = tl.full([], LOWEST + 1, tl.int32), tl.where(top_k > 0.0, 0, 1)
    high, wanted, begins = ordered_key(largest), tl.full([], 0.0, tl.float32), True
    last = tl.where(top_p < 1.0, 1, 0)
    while phase <= last:
        # The pass with which a filter begins finds what all tokens weigh that the one before it keeps.
        middle = tl.where(begins, low, ((low.to(tl.int64) + high + 1) >> 1).to(tl.int32))
        mass, above, below = weigh(rows, b, j, low, middle, largest, inverse(temperature), phase == 0)
        if begins:
            wanted = tl.where(phase == 0, tl.minimum(mass, top_k), tl.maximum(top_p * mass, 1.1754944e-38))
            low = above
        else:
            high = tl.where(mass >= wanted, high, tl.maximum(low, below))
            low = tl.where(mass >= wanted, above, low)
        begins = low >= high
        phase = tl.where(begins, phase + 1, phase)
        high = tl.where(begins, ordered_key(largest), high)
    return low


@triton.jit
def store_sums_of_row(rows, b, j, cutoff, temperature):
    """Stores the block sums of the tokens at or above the cutoff."""
    for group in range(0, tl.cdiv(rows.num_blocks, GROUP)):
        its_max = load_group_max(rows, b, j, group, GROUP)
        total = tl.zeros([GROUP], tl.float32)
        if tl.max(its_max, 0) >= cutoff:
            x = tl.reshape(load_group(rows, b, j, group, GROUP), [GROUP, BLOCK])
            w = weight(x, its_max[:, None], inverse(temperature))
            total = tl.sum(tl.where(x >= cutoff, w, 0.0), 1)
        block = group * GROUP + tl.arange(0, GROUP)
        at = stats_row(rows, b, j) * rows.num_blocks + block
        tl.store(rows.sum_ptr + at, total, mask=block < rows.num_blocks)
