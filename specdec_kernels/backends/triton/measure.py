"""The launch ``measure``: of every block of 1024 logits, the largest and the sum of the weights relative to it.

A program has a few consecutive blocks of a row, each of which one warp sums up in the same order however many there
are."""

from __future__ import annotations

import triton
import triton.language as tl

from .core import blocks_stats
from .dependent import let_next_begin
from .draw import race_tokens
from .rows import (
    PART,
    PARTS_OF_A_BLOCK,
    adjust_tokens,
    blocks_of,
    is_drafted_from,
    load_limit,
    load_raw,
    stats_row,
    tokens_of,
)


@triton.jit
def measure_blocks(rows, b, j, block, raced):
    """Stores the statistics of the [N] blocks ``block`` of row (b, j)."""
    index = tokens_of(block)
    raw = load_raw(rows, b, j, index, index < rows.vocabulary)
    temperature = tl.load(rows.sampling.temperature_ptr + b)
    x = adjust_tokens(raw, rows, b, j, index)
    at, there = blocks_of(rows, b, j) + block, block < rows.num_blocks
    largest, total = blocks_stats(x, temperature)
    tl.store(rows.max_ptr + at, largest, mask=there)
    tl.store(rows.sum_ptr + at, total, mask=there)
    if rows.part_max_ptr is not None:
        part = block[:, None] * PARTS_OF_A_BLOCK + tl.arange(0, PARTS_OF_A_BLOCK)[None, :]
        part_max = tl.max(tl.reshape(x, [x.shape[0], PARTS_OF_A_BLOCK, PART]), 2)
        first = stats_row(rows, b, j) * rows.num_blocks * PARTS_OF_A_BLOCK
        tl.store(rows.part_max_ptr + first + part, part_max, mask=there[:, None])
    if rows.raw_max_ptr is not None:
        raw_largest, raw_total = blocks_stats(raw, tl.full([], 1.0, tl.float32))
        tl.store(rows.raw_max_ptr + at, raw_largest, mask=there)
        tl.store(rows.raw_sum_ptr + at, raw_total, mask=there)
    if raced is not None:
        race_tokens(rows, b, j, block, x, largest, raced, there)


@triton.jit(do_not_specialize=["first_row"])
def measure_kernel(
    target,  # Rows
    draft,  # Rows, or NO_ROWS if only the target's rows are measured
    num_drafts_ptr,  # [B] or None
    num_rows,  # of the target, per sequence; the draft has one less
    first_row,  # offset of the first row in the step
    raced,  # (scores, winners) of rule `coupled`, where nothing filters; else None
    N: tl.constexpr,  # blocks of a program
    FOLDED: tl.constexpr,  # whether the grid's first dimension is that of parts and sequences, as there are too many
    DEPENDENT: tl.constexpr,
):
    """Program (part of a row, sequence, row), the draft's rows after the target's."""
    let_next_begin(DEPENDENT)
    part, b = tl.program_id(0), tl.program_id(1)
    if FOLDED:
        parts = (target.num_blocks + N - 1) // N
        b, part = part // parts, part % parts
    b, i = b.to(tl.int64), tl.program_id(2)
    block = part * N + tl.arange(0, N)
    if draft.ptr is None:
        if i <= load_limit(num_drafts_ptr, b, num_rows - 1):
            measure_blocks(target, b, (i + first_row).to(tl.int64), block, raced)
    else:
        if i < num_rows:
            if i <= load_limit(num_drafts_ptr, b, num_rows - 1):
                measure_blocks(target, b, (i + first_row).to(tl.int64), block, raced)
        else:
            i -= num_rows
            # Greedy sequences treat drafts as one-hot, whatever the draft logits are.
            if tl.load(draft.sampling.temperature_ptr + b) != 0.0:
                if is_drafted_from(draft, b, i, load_limit(num_drafts_ptr, b, num_rows - 1)):
                    measure_blocks(draft, b, (i + first_row).to(tl.int64), block, None)
