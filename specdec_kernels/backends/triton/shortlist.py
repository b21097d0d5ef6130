"""The logits of a row in an interval, in a list, where few of them decide everything.

``measure`` has found the largest of every 128 consecutive logits. Of these parts, only those that reach the interval
are read. A program lists what it finds in the order of the tokens, so no two of its threads write one place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .core import BLOCK, INFINITY, LOWEST, from_ordered_key, inverse, ordered_key, weight
from .rows import PART, PARTS_OF_A_BLOCK, blocks_of, load_tokens, stats_row

LISTED = tl.constexpr(1024)  # logits that a list has room for
FEW = tl.constexpr(128)  # of which that many are compared at once
LIST = tl.constexpr(2 * LISTED.value)  # numbers of scratch
COMPARED = tl.constexpr(16)  # with that many others
UNIT = tl.constexpr(1099511627776.0)  # 2^40, the mass of the largest logit: sums of integers have no order
ONE = tl.constexpr(1 << 51)  # what a logit counts for, beside its mass: more than the mass of a list
EMPTY = tl.constexpr(LOWEST.value << 32)  # of a list: no logit
GREATEST, ALL = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def load_part_keys(rows, b, j, BLOCKS: tl.constexpr):
    """[8 BLOCKS] keys of the largest logits of the row's parts."""
    part, number = tl.arange(0, BLOCKS * PARTS_OF_A_BLOCK), rows.num_blocks * PARTS_OF_A_BLOCK
    at = stats_row(rows, b, j) * number + part
    return ordered_key(tl.load(rows.part_max_ptr + at, mask=part < number, other=-INFINITY))


@triton.jit
def nth_of(keys, n):
    """The n-th largest of the ``keys`` to 16 bits, a lower bound; the smallest int32 if there are fewer."""
    digit, found = tl.arange(0, 16), tl.full([], -0x80000000, tl.int32)
    shift = 28 + tl.program_id(2)  # + 0, which compilers do not know, so that they make no four copies of the loop
    while shift >= 16:
        tried = found + (digit << shift)
        reach = tl.sum((keys[None, :] >= tried[:, None]).to(tl.int32), 1)
        found = tl.maximum(found, tl.max(tl.where(reach >= n, tried, -0x80000000), 0))
        shift -= 4
    return found


@triton.jit
def parts_of(rows, b, j):
    """Where the row's list of parts begins, which has room for all."""
    return rows.scratch_ptr + stats_row(rows, b, j) * (rows.num_blocks * PARTS_OF_A_BLOCK + LIST)


@triton.jit
def list_of(rows, b, j):
    """Where the row's list of logits begins: LISTED keys, each with its token in the lower half, and what is above
    each."""
    return parts_of(rows, b, j) + rows.num_blocks * PARTS_OF_A_BLOCK


@triton.jit
def list_parts(rows, b, j, part_keys, low):
    """Lists the parts whose largest logit has a key of at least ``low``. Returns how many there are."""
    reach = part_keys >= low
    place = tl.cumsum(reach.to(tl.int32), 0) - 1
    tl.debug_barrier()  # nobody reads the former list any more
    tl.store(parts_of(rows, b, j) + place, tl.arange(0, part_keys.shape[0]).to(tl.int64), mask=reach)
    tl.debug_barrier()
    return tl.sum(reach.to(tl.int32), 0)


@triton.jit
def load_parts(rows, b, j, first, number, TILE: tl.constexpr):
    """([TILE, 128] keys, [TILE, 128] tokens) of the listed parts from ``first`` on; LOWEST beyond them."""
    slot = first + tl.arange(0, TILE)
    part = tl.load(parts_of(rows, b, j) + slot, mask=slot < number, other=rows.num_blocks * PARTS_OF_A_BLOCK)
    index = part.to(tl.int32)[:, None] * PART + tl.arange(0, PART)[None, :]
    return ordered_key(load_tokens(rows, b, j, index)), index


@triton.jit
def list_logits(rows, b, j, number, low, high, TILE: tl.constexpr):
    """Lists the logits of the ``number`` listed parts that have keys in low .. high. Returns how many there are; more
    than LISTED: not all are listed."""
    list_ptr, first, size = list_of(rows, b, j), number * 0, number * 0
    while (first < number) & (size <= LISTED):
        keys, tokens = load_parts(rows, b, j, first, number, TILE)
        inside = ((keys >= low) & (keys <= high)).to(tl.int32)
        of_part = tl.sum(inside, 1)
        place = size + (tl.cumsum(of_part, 0) - of_part)[:, None] + tl.cumsum(inside, 1) - 1
        entry = (keys.to(tl.int64) << 32) | tokens.to(tl.int64)
        tl.store(list_ptr + place, entry, mask=(inside != 0) & (place < LISTED))
        size += tl.sum(of_part, 0)
        first += TILE
    tl.debug_barrier()
    return size


@triton.jit
def load_list(list_ptr, slot, size):
    """(keys, tokens) of the list; LOWEST beyond it."""
    entry = tl.load(list_ptr + slot, mask=slot < size, other=EMPTY)
    return (entry >> 32).to(tl.int32), entry.to(tl.int32)


@triton.jit
def amounts_of(keys, largest, inverse_temperature):
    """A logit's mass in UNITs, and ONE. Nothing for LOWEST."""
    mass = weight(from_ordered_key(keys), largest, inverse_temperature) * UNIT
    return tl.where(keys > LOWEST, mass.to(tl.int64) + ONE, 0)


@triton.jit
def weigh_list(rows, b, j, size, largest, inverse_temperature):
    """Stores behind the list what is above each of its logits, as the sum of ``amounts_of`` these. By all pairs: that
    takes fewer steps than sorting, and these need not wait for one another."""
    list_ptr = list_of(rows, b, j)
    for own in range(0, size, FEW):
        slot, above = own + tl.arange(0, FEW), tl.zeros([FEW], tl.int64)
        keys, tokens = load_list(list_ptr, slot, size)
        for first in range(0, size, COMPARED):
            others, their_tokens = load_list(list_ptr, first + tl.arange(0, COMPARED), size)
            amount = amounts_of(others, largest, inverse_temperature)
            above += tl.sum(tl.where(others[:, None] > keys[None, :], amount[:, None], 0), 0)
        tl.store(list_ptr + LISTED + slot, above)
    tl.debug_barrier()


@triton.jit
def least_kept(rows, b, j, size, largest, inverse_temperature, most, left, share):
    """(the smallest of the ``size`` <= LISTED keys that is kept; the mass of those that top-k keeps). Kept are those
    above which there are fewer than ``most`` others and less than ``left`` of mass; or, if ``share`` is not negative,
    less than that share of the mass that ``most`` keeps."""
    weigh_list(rows, b, j, size, largest, inverse_temperature)
    slot, list_ptr = tl.arange(0, LISTED), list_of(rows, b, j)
    keys, tokens = load_list(list_ptr, slot, size)
    above = tl.load(list_ptr + LISTED + slot, mask=slot < size, other=0)
    counted = (keys > LOWEST) & ((above // ONE).to(tl.float32) < most)
    amount = amounts_of(keys, largest, inverse_temperature) % ONE
    mass = tl.sum(tl.where(counted, amount, 0), 0)
    left = tl.where(share >= 0.0, (share * mass.to(tl.float32)).to(tl.int64), left)
    kept = counted & (above % ONE < tl.maximum(left, 1))  # top_p = 0 keeps the largest logit
    return tl.min(tl.where(kept, keys, GREATEST), 0), mass


@triton.jit
def store_sums_of_list(rows, b, j, size, cutoff, temperature, BLOCKS: tl.constexpr):
    """Stores the block sums of the tokens at or above the cutoff, all of which are listed."""
    at, block, list_ptr = blocks_of(rows, b, j), tl.arange(0, BLOCKS), list_of(rows, b, j)
    total = tl.zeros([BLOCKS], tl.int64)
    for first in range(0, size, COMPARED):
        keys, tokens = load_list(list_ptr, first + tl.arange(0, COMPARED), size)
        x, its_block = from_ordered_key(keys), tokens // BLOCK
        its_max = tl.load(rows.max_ptr + at + its_block)
        mass = tl.where(x >= cutoff, weight(x, its_max, inverse(temperature)) * UNIT, 0.0).to(tl.int64)
        total += tl.sum(tl.where(its_block[:, None] == block[None, :], mass[:, None], 0), 0)
    tl.store(rows.sum_ptr + at + block, total.to(tl.float32) * (1.0 / UNIT), mask=block < rows.num_blocks)
