"""The launch ``select``: the cutoff of top-k, top-p and min-p. One program for each row, without sorting it.

``cutoff.py`` finds the cutoff, most often among few logits of a list (``shortlist.py``), from which the block sums of
what is kept are taken as well.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .core import INFINITY, from_ordered_key, inverse, min_p_cutoff, ordered_key, row_fault, sum_of_masses
from .core import sums_of_blocks, weight
from .cutoff import find_cutoff
from .dependent import let_next_begin, wait_for_earlier
from .rows import GROUP, PARTS_OF_A_BLOCK, is_drafted_from, load_group, load_group_max, load_limit, load_merged
from .rows import stats_row
from .shortlist import store_sums_of_list


@triton.jit
def store_sums_of_row(rows, b, j, cutoff, temperature):
    """Stores the block sums of the tokens at or above the cutoff, of a row in which too many are kept for a list."""
    for group in range(0, tl.cdiv(rows.num_blocks, GROUP)):
        its_max = load_group_max(rows, b, j, group, GROUP)
        total = tl.zeros([GROUP], tl.float32)
        if tl.max(its_max, 0) >= cutoff:
            x = tl.reshape(load_group(rows, b, j, group, GROUP), [GROUP, 1024])
            w = weight(x, its_max[:, None], inverse(temperature))
            total = sums_of_blocks(tl.where(x >= cutoff, w, 0.0), False)
        block = group * GROUP + tl.arange(0, GROUP)
        at = stats_row(rows, b, j) * rows.num_blocks + block
        tl.store(rows.sum_ptr + at, total, mask=block < rows.num_blocks)


@triton.jit
def select_row(rows, b, j, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """Stores the cutoff of row (b, j) and the block sums of the tokens it keeps."""
    row = stats_row(rows, b, j)
    temperature = tl.load(rows.sampling.temperature_ptr + b)
    at = rows.sampling.filters_ptr + b * 3
    top_k, top_p, min_p = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    part, number = tl.arange(0, BLOCKS * PARTS_OF_A_BLOCK), rows.num_blocks * PARTS_OF_A_BLOCK
    part_max = tl.load(rows.part_max_ptr + row * number + part, mask=part < number, other=-INFINITY)
    largest, lse, mass, block_max = load_merged(
        rows.max_ptr, rows.sum_ptr, row * rows.num_blocks, rows.num_blocks, temperature, BLOCKS
    )
    cutoff = tl.full([], -INFINITY, tl.float32)
    if (temperature != 0.0) & (row_fault(largest) == 0) & ((top_k > 0.0) | (top_p < 1.0) | (min_p > 0.0)):
        total = sum_of_masses(mass)
        key, size = find_cutoff(
            rows, b, j, ordered_key(part_max), largest, total, temperature, top_k, top_p, min_p, TILE
        )
        cutoff = tl.maximum(from_ordered_key(key), min_p_cutoff(largest, temperature, min_p))
        if size >= 0:
            store_sums_of_list(rows, b, j, size, cutoff, temperature, BLOCKS)
        else:
            store_sums_of_row(rows, b, j, cutoff, temperature)
    tl.store(rows.cutoff_ptr + row, cutoff)


@triton.jit(do_not_specialize=["first_row"])
def select_kernel(
    target,  # Rows; one program for each row that may be needed, as in ``measure``
    draft,  # Rows, or NO_ROWS
    num_drafts_ptr,  # [B] or None
    num_rows,
    first_row,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,  # parts of 128 logits that are read at once
    DEPENDENT: tl.constexpr,
):
    """Program (sequence, row)."""
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    b, i = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if draft.ptr is None:
        if i <= load_limit(num_drafts_ptr, b, num_rows - 1):
            select_row(target, b, i + first_row, BLOCKS, TILE)
    else:
        if i < num_rows:
            if i <= load_limit(num_drafts_ptr, b, num_rows - 1):
                select_row(target, b, i + first_row, BLOCKS, TILE)
        else:
            i -= num_rows
            if is_drafted_from(draft, b, i, load_limit(num_drafts_ptr, b, num_rows - 1)):
                select_row(draft, b, i + first_row, BLOCKS, TILE)
