"""The launch ``select_flat``: the same for rows in which too many logits are near or above the cutoff for one list. For
the others, which are most, a program ends at once.

An interval that holds the cutoff becomes smaller until its logits fit in a list. A pass over the row says what lies at
or above each of 8 pivots, which are at equal distances in the logits, so that flat and peaked rows spread over them;
and after three such passes in their bits, so that 12 of these passes suffice whatever the logits are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .core import (
    BLOCK,
    INFINITY,
    LOWEST,
    from_ordered_key,
    inverse,
    merge,
    min_p_cutoff,
    ordered_key,
    sum_of_masses,
    sums_of_blocks,
    weight,
)
from .rows import PART, blocks_of, load_blocks, load_tokens, stats_row
from .select import select_with
from .shortlist import (
    ALL,
    GREATEST,
    LISTED,
    UNIT,
    least_kept,
    list_logits,
    list_parts,
    load_part_keys,
    load_parts,
    nth_of,
)

PIVOTS = tl.constexpr(8)
GROUP = tl.constexpr(4)  # blocks that are read at once where all of a row are


@triton.jit
def least_for_top_p(rows, largest, total, temperature, top_p):
    """The key of a logit below which even all tokens together weigh less than 1 - top_p. Allows for rounding."""
    distance = temperature * tl.log((1.0 - top_p) * total / rows.num_blocks / BLOCK)
    bound = largest + distance - 1e-5 * (temperature + tl.abs(largest) + tl.abs(distance))
    return ordered_key(tl.minimum(bound, largest))


@triton.jit
def pivots_of(low, high, turn):
    """[PIVOTS] ascending keys, the first and the last of which are ``low`` and ``high``."""
    i = tl.arange(0, PIVOTS)
    part = i.to(tl.float32) * (1.0 / (PIVOTS - 1))
    by_value = ordered_key(from_ordered_key(low) * (1.0 - part) + from_ordered_key(high) * part)
    by_bits = (low + ((high.to(tl.int64) - low) * i + PIVOTS - 2) // (PIVOTS - 1)).to(tl.int32)
    pivot = tl.where(turn % 4 == 3, by_bits, tl.minimum(tl.maximum(by_value, low), high))
    return tl.where(i == 0, low, tl.where(i == PIVOTS - 1, high, pivot))


@triton.jit
def weigh(rows, b, j, number, pivots, largest, inverse_temperature, counting, TILE: tl.constexpr):
    """([PIVOTS] the weights of the row's logits at or above each pivot or, if ``counting``, their numbers; the smallest
    and the largest key between the first and the last pivot), of the ``number`` listed parts. A float32 sum of
    non-negative numbers in a fixed order never falls when a number is added, so the sums are in order as well."""
    amount, first, low, high = tl.zeros([PIVOTS], tl.float32), number * 0, tl.min(pivots, 0), tl.max(pivots, 0)
    smallest, greatest = tl.full([], GREATEST, tl.int32), tl.full([], LOWEST, tl.int32)
    while first < number:
        keys = tl.reshape(load_parts(rows, b, j, first, number, TILE)[0], [TILE * PART])
        w = tl.where(counting, 1.0, weight(from_ordered_key(keys), largest, inverse_temperature))
        amount += tl.sum(tl.where(keys[None, :] >= pivots[:, None], w[None, :], 0.0), 1)
        smallest = tl.minimum(smallest, tl.min(tl.where(keys >= low, keys, GREATEST), 0))
        greatest = tl.maximum(greatest, tl.max(tl.where(keys <= high, keys, LOWEST), 0))
        first += TILE
    return amount, smallest, greatest


@triton.jit
def find_cutoff(rows, b, j, largest, total, temperature, top_k, top_p, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """The key of the smallest logit that top-k and then top-p keep; LOWEST if they keep all. ``total``: the row's
    weight."""
    part_keys, inverse_temperature = load_part_keys(rows, b, j, BLOCKS), inverse(temperature)
    # `counting`: what is wanted at or above the cutoff is a number. Else it is a weight, not known yet if negative.
    counting, weighing, top = top_k > 0.0, top_p < 1.0, ordered_key(largest)
    wanted = tl.where(counting, top_k, tl.maximum(top_p * total, 1.1754944e-38))
    # The cutoff is in low .. high. The logits beyond amount to ``above``.
    low = nth_of(part_keys, top_k)
    if counting == 0:
        low = least_for_top_p(rows, largest, total, temperature, top_p)
    low, high = tl.maximum(low, LOWEST + 1), top
    above, turn, working = tl.full([], 0.0, tl.float32), low * 0, counting | weighing
    low = tl.where(working, low, LOWEST)
    while working:
        number = list_parts(rows, b, j, part_keys, low)
        size = list_logits(rows, b, j, number, low, high, TILE)
        if (size <= LISTED) & (wanted >= 0.0):
            most = tl.where(counting, wanted - above, INFINITY)
            left = tl.where(counting, ALL, (tl.where(counting, 0.0, wanted - above) * UNIT).to(tl.int64))
            low, mass = least_kept(rows, b, j, size, largest, inverse_temperature, most, left, -1.0)
            high = low
        else:
            pivots = pivots_of(low, high, turn)
            amount, smallest, greatest = weigh(rows, b, j, number, pivots, largest, inverse_temperature, counting, TILE)
            wanted = tl.where(wanted < 0.0, tl.maximum(top_p * tl.max(amount, 0), 1.1754944e-38), wanted)
            enough = amount >= wanted
            low = tl.maximum(smallest, tl.max(tl.where(enough, pivots, low), 0))
            high = tl.minimum(greatest, tl.min(tl.where(enough, high, pivots - 1), 0))
            above, turn = tl.maximum(above, tl.max(tl.where(enough, 0.0, amount), 0)), turn + 1
        if low >= high:
            working = counting & weighing
            if working:  # top-p of what top-k keeps
                counting, high, above, turn = False, top, tl.full([], 0.0, tl.float32), low * 0
                wanted = tl.full([], -1.0, tl.float32)
    return low


@triton.jit
def load_group_max(rows, b, j, group, SIZE: tl.constexpr):
    """[SIZE] largest logits, one for each of ``SIZE`` consecutive blocks, the ``group``-th so many of the row."""
    block = group * SIZE + tl.arange(0, SIZE)
    return tl.load(rows.max_ptr + blocks_of(rows, b, j) + block, mask=block < rows.num_blocks, other=-INFINITY)


@triton.jit
def load_group(rows, b, j, group, SIZE: tl.constexpr):
    """[SIZE * 1024] adjusted logits of these blocks."""
    return load_tokens(rows, b, j, tl.cast(group, tl.int32) * (SIZE * BLOCK) + tl.arange(0, SIZE * BLOCK))


@triton.jit
def store_sums_of_row(rows, b, j, cutoff, temperature):
    """Stores the block sums of the tokens at or above the cutoff."""
    for group in range(0, tl.cdiv(rows.num_blocks, GROUP)):
        its_max = load_group_max(rows, b, j, group, GROUP)
        total = tl.zeros([GROUP], tl.float32)
        if tl.max(its_max, 0) >= cutoff:
            x = tl.reshape(load_group(rows, b, j, group, GROUP), [GROUP, BLOCK])
            w = weight(x, its_max[:, None], inverse(temperature))
            total = sums_of_blocks(tl.where(x >= cutoff, w, 0.0), False)
        block = group * GROUP + tl.arange(0, GROUP)
        tl.store(rows.sum_ptr + blocks_of(rows, b, j) + block, total, mask=block < rows.num_blocks)


@triton.jit
def select_flat_row(rows, b, j, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    row, cutoff = stats_row(rows, b, j), tl.load(rows.cutoff_ptr + stats_row(rows, b, j))
    if cutoff != cutoff:
        temperature, at = tl.load(rows.sampling.temperature_ptr + b), rows.sampling.filters_ptr + b * 3
        top_k, top_p, min_p = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        block_max, block_sum = load_blocks(rows, b, j, BLOCKS)
        largest, lse, mass = merge(block_max, block_sum, temperature, 0)
        key = find_cutoff(rows, b, j, largest, sum_of_masses(mass), temperature, top_k, top_p, BLOCKS, TILE)
        cutoff = tl.maximum(from_ordered_key(key), min_p_cutoff(largest, temperature, min_p))
        store_sums_of_row(rows, b, j, cutoff, temperature)
        tl.store(rows.cutoff_ptr + row, cutoff)


@triton.jit(do_not_specialize=["first_row"])
def select_flat_kernel(
    target, draft, num_drafts_ptr, num_rows, first_row, BLOCKS: tl.constexpr, TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """As ``select_kernel``."""
    select_with(select_flat_row, target, draft, num_drafts_ptr, num_rows, first_row, BLOCKS, TILE, DEPENDENT)
