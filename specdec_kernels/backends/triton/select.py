"""The launch ``select``: the cutoff of top-k, top-p and min-p. One program for each row, without sorting it.

What filters keep is nearly always among few logits, which are listed (shortlist.py): those that reach a bound below
which top-k keeps nothing, or for top-p alone one that about 256 reach. Where the list is too short, the row is left to
``select_flat``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .core import (
    INFINITY,
    LOWEST,
    from_ordered_key,
    inverse,
    merge,
    min_p_cutoff,
    ordered_key,
    row_fault,
    sum_of_masses,
)
from .dependent import let_next_begin, wait_for_earlier
from .rows import is_drafted_from, load_blocks, load_limit, stats_row
from .shortlist import (
    ALL,
    GREATEST,
    LISTED,
    UNIT,
    least_kept,
    list_logits,
    list_parts,
    load_part_keys,
    nth_of,
    store_sums_of_list,
)

LIKELY = tl.constexpr(256.0)  # parts that hold what top-p alone keeps, in most rows


@triton.jit
def select_row(rows, b, j, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """Stores the cutoff of row (b, j) and the block sums of the tokens it keeps; or NaN as the cutoff, if many are."""
    row = stats_row(rows, b, j)
    temperature, at = tl.load(rows.sampling.temperature_ptr + b), rows.sampling.filters_ptr + b * 3
    top_k, top_p, min_p = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    part_keys = load_part_keys(rows, b, j, BLOCKS)
    block_max, block_sum = load_blocks(rows, b, j, BLOCKS)
    largest, lse, mass = merge(block_max, block_sum, temperature, 0)
    counting, weighing, cutoff = top_k > 0.0, top_p < 1.0, tl.full([], -INFINITY, tl.float32)
    if (temperature != 0.0) & (row_fault(largest * inverse(temperature)) == 0) & (counting | weighing | (min_p > 0.0)):
        least = min_p_cutoff(largest, temperature, min_p)
        low = tl.where(counting | weighing, nth_of(part_keys, tl.where(counting, top_k, LIKELY)), ordered_key(least))
        low = tl.maximum(low, LOWEST + 1)
        number = list_parts(rows, b, j, part_keys, low)
        size = list_logits(rows, b, j, number, low, GREATEST, TILE)
        cutoff = tl.full([], float("nan"), tl.float32)
        if size <= LISTED:
            most, share = tl.where(counting, top_k, INFINITY), tl.where(counting & weighing, top_p, -1.0)
            left = tl.where(weighing & (counting == 0), (top_p * sum_of_masses(mass) * UNIT).to(tl.int64), ALL)
            key, listed = least_kept(rows, b, j, size, largest, inverse(temperature), most, left, share)
            if (counting | (weighing == 0)) | (listed >= left):
                cutoff = tl.where(counting | weighing, tl.maximum(from_ordered_key(key), least), least)
                store_sums_of_list(rows, b, j, size, cutoff, temperature, BLOCKS)
    tl.store(rows.cutoff_ptr + row, cutoff)


@triton.jit
def select_with(
    select: tl.constexpr, target, draft, num_drafts_ptr, num_rows, first_row, BLOCKS: tl.constexpr,
    TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (sequence, row): ``select``, such as ``select_row``, of the row if it may be needed."""
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    b, i = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    limit = load_limit(num_drafts_ptr, b, num_rows - 1)
    if draft.ptr is None:
        if i <= limit:
            select(target, b, i + first_row, BLOCKS, TILE)
    else:
        if i < num_rows:
            if i <= limit:
                select(target, b, i + first_row, BLOCKS, TILE)
        elif is_drafted_from(draft, b, i - num_rows, limit):
            select(draft, b, i - num_rows + first_row, BLOCKS, TILE)


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
    select_with(select_row, target, draft, num_drafts_ptr, num_rows, first_row, BLOCKS, TILE, DEPENDENT)
