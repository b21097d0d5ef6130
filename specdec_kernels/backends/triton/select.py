"""The launch ``select``: the cutoff of top-k, top-p and min-p. One program for each row, without sorting.

What filters keep is nearly always among few logits. ``measure`` has found the largest of every 128 consecutive logits;
of these parts, the TILE best ones hold every logit above the best of the others. The k-th largest logit and the cutoff
of top-p are found among those, in registers. If they are not above, as in a flat row with top-p alone, the program goes
over the row, as often as it takes (bisect.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bisect import cutoff_of_row, store_sums_of_row
from .core import INFINITY, LOWEST, add_pairs, from_ordered_key, inverse, min_p_cutoff, ordered_key, row_fault, weight
from .dependent import let_next_begin, wait_for_earlier
from .rows import PART, PARTS_OF_A_BLOCK, is_drafted_from, load_limit, load_merged, load_tokens, stats_row

TILE = tl.constexpr(64)


@triton.jit
def nth_of(keys, n, high):
    """The largest number such that at least n of the ``keys`` are at or above it; LOWEST if there are fewer."""
    low = tl.full([], LOWEST, tl.int32)
    while low < high:
        middle = ((low.to(tl.int64) + high + 1) >> 1).to(tl.int32)
        enough = tl.sum((keys >= middle).to(tl.int32), 0) >= n
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return low


@triton.jit
def best_parts(rows, b, j, largest, PARTS: tl.constexpr):
    """([TILE] the best parts of a row, beyond the row where there are fewer; the key of the best of the others)."""
    row, part = stats_row(rows, b, j), tl.arange(0, PARTS)
    number = rows.num_blocks * PARTS_OF_A_BLOCK
    part_max = tl.load(rows.part_max_ptr + row * number + part, mask=part < number, other=-INFINITY)
    keys = ordered_key(part_max)
    good = keys >= nth_of(keys, TILE, ordered_key(largest))
    place = tl.cumsum(good.to(tl.int32), 0)
    chosen = good & (place <= TILE)
    slot = tl.arange(0, TILE)
    tl.store(rows.chosen_ptr + row * TILE + slot, tl.full([TILE], 0, tl.int32) + number)
    tl.debug_barrier()
    tl.store(rows.chosen_ptr + row * TILE + place - 1, part, mask=chosen)
    tl.debug_barrier()
    return tl.load(rows.chosen_ptr + row * TILE + slot), tl.max(tl.where(chosen, LOWEST, keys), 0)


@triton.jit
def bisect(keys, weights, low, high, wanted):
    """The largest key in low .. high such that the ``weights`` of those at or above it are at least ``wanted``. Those
    at or above ``low`` must be."""
    while low < high:
        middle = ((low.to(tl.int64) + high + 1) >> 1).to(tl.int32)
        mass = tl.sum(tl.where(keys >= middle, weights, 0.0))
        above = tl.min(tl.where(keys >= middle, keys, 0x7FFFFFFF))
        below = tl.max(tl.where(keys < middle, keys, LOWEST))
        high = tl.where(mass >= wanted, high, tl.maximum(low, below))
        low = tl.where(mass >= wanted, above, low)
    return low


@triton.jit
def cutoff_of_tile(x, others, largest, total, temperature, top_k, top_p):
    """(the key of the smallest logit that top-k and then top-p keep, LOWEST if they are off; whether that is certain).
    ``x``: the logits of the best parts; ``others``: the key of the best of the rest; ``total``: the row's weight."""
    keys, high = ordered_key(x), ordered_key(largest)
    whole, valid = others == LOWEST, keys > others
    low, certain = tl.full([], LOWEST, tl.int32), True
    if top_k > 0.0:
        number = tl.sum(valid.to(tl.float32))
        certain = whole | (number >= top_k)
        lowest = tl.min(tl.where(valid, keys, 0x7FFFFFFF))
        low = bisect(keys, tl.where(valid, 1.0, 0.0), lowest, high, tl.minimum(number, top_k))
    if certain & (top_p < 1.0):
        weights = tl.where(valid & (keys >= low), weight(x, largest, inverse(temperature)), 0.0)
        mass = tl.sum(weights)
        total = tl.where(whole | (top_k > 0.0), mass, total)
        wanted = tl.maximum(top_p * total, 1.1754944e-38)  # top_p = 0 keeps the largest logit
        certain = mass >= wanted
        lowest = tl.min(tl.where(valid & (keys >= low), keys, 0x7FFFFFFF))
        if certain:
            low = bisect(keys, weights, lowest, high, wanted)
    return low, certain


@triton.jit
def store_sums(rows, b, j, x, parts, cutoff, temperature, BLOCKS: tl.constexpr):
    """Stores the block sums of the tokens that are kept, all of which are in the best parts."""
    at, its_block, block = stats_row(rows, b, j) * rows.num_blocks, parts // PARTS_OF_A_BLOCK, tl.arange(0, BLOCKS)
    its_max = tl.load(rows.max_ptr + at + its_block, mask=its_block < rows.num_blocks, other=0.0)
    w = tl.where(x >= cutoff, weight(x, its_max[:, None], inverse(temperature)), 0.0)
    for _level in tl.static_range(6):
        w = add_pairs(w, True)
    total = tl.sum(tl.where(block[:, None] == its_block[None, :], tl.sum(w, 1)[None, :], 0.0), 1)
    tl.store(rows.sum_ptr + at + block, total, mask=block < rows.num_blocks)


@triton.jit
def select_row(rows, b, j, BLOCKS: tl.constexpr):
    """Stores the cutoff of row (b, j) and the block sums of the tokens it keeps."""
    row = stats_row(rows, b, j)
    temperature = tl.load(rows.sampling.temperature_ptr + b)
    at = rows.sampling.filters_ptr + b * 3
    top_k, top_p, min_p = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    largest, lse, mass, block_max = load_merged(
        rows.max_ptr, rows.sum_ptr, row * rows.num_blocks, rows.num_blocks, temperature, BLOCKS
    )
    cutoff = tl.full([], -INFINITY, tl.float32)
    if (temperature != 0.0) & (row_fault(largest) == 0) & ((top_k > 0.0) | (top_p < 1.0) | (min_p > 0.0)):
        parts, others = best_parts(rows, b, j, largest, BLOCKS * PARTS_OF_A_BLOCK)
        x = load_tokens(rows, b, j, parts[:, None] * PART + tl.arange(0, PART)[None, :])
        low, certain = cutoff_of_tile(x, others, largest, tl.sum(mass, 0), temperature, top_k, top_p)
        if certain == 0:
            low = cutoff_of_row(rows, b, j, largest, temperature, top_k, top_p)
        cutoff = tl.maximum(from_ordered_key(low), min_p_cutoff(largest, temperature, min_p))
        if cutoff > -INFINITY:
            if ordered_key(cutoff) > others:
                store_sums(rows, b, j, x, parts, cutoff, temperature, BLOCKS)
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
    DEPENDENT: tl.constexpr,
):
    """Program (sequence, row)."""
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    b, i = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if draft.ptr is None:
        if i <= load_limit(num_drafts_ptr, b, num_rows - 1):
            select_row(target, b, i + first_row, BLOCKS)
    else:
        if i < num_rows:
            if i <= load_limit(num_drafts_ptr, b, num_rows - 1):
                select_row(target, b, i + first_row, BLOCKS)
        else:
            i -= num_rows
            if is_drafted_from(draft, b, i, load_limit(num_drafts_ptr, b, num_rows - 1)):
                select_row(draft, b, i + first_row, BLOCKS)
