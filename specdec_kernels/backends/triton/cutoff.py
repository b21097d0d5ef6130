"""The cutoff of top-k and top-p: an interval that holds it becomes smaller, until its logits fit in a list.

What filters keep is nearly always among few logits. The first interval is a guess from the largest logits of the row's
parts: it holds as many as top-k keeps, and for top-p about 256. Where the cutoff is below it, or too many
logits are in it, as in flat rows, a pass over the row says what lies at or above each of 16 pivots. Rows of any kind
take few passes: pivots are at equal distances in the logits, so that flat and peaked rows spread over them; and after
three such turns in their bits, so that 10 of these turns suffice whatever the logits are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .core import INFINITY, LOWEST, from_ordered_key, inverse, min_p_cutoff, ordered_key, weight
from .shortlist import FEW, GREATEST, LISTED, UNIT, least_kept, list_logits, list_parts, load_parts

LIKELY = tl.constexpr(256.0)  # parts in which top-p alone is looked for first
PIVOTS = tl.constexpr(16)
ALL = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def nth_of(keys, n):
    """The n-th largest of the ``keys`` to 16 bits, which bounds it from below; the smallest int32 if there are fewer."""
    digit, found = tl.arange(0, 16), tl.full([], -0x80000000, tl.int32)
    for i in range(0, 4):
        tried = found + (digit << (28 - 4 * i))
        reach = tl.sum((keys[None, :] >= tried[:, None]).to(tl.int32), 1)
        found = tl.maximum(found, tl.max(tl.where(reach >= n, tried, -0x80000000), 0))
    return found


@triton.jit
def least_for_top_p(rows, largest, total, temperature, top_p):
    """The key of a logit below which even all tokens together weigh less than 1 - top_p. Allows for rounding."""
    distance = temperature * tl.log((1.0 - top_p) * total / rows.num_blocks / 1024.0)
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
def weigh(rows, b, j, number, pivots, high, largest, inverse_temperature, counting, TILE: tl.constexpr):
    """([PIVOTS] the weights of the row's logits at or above each pivot or, if ``counting``, their numbers; the smallest
    and the largest key in the interval from the first pivot to ``high``), of the ``number`` listed parts. A float32 sum
    of non-negative numbers in a fixed order never falls when a number is added, so the sums are in order as well."""
    amount, first, low = tl.zeros([PIVOTS], tl.float32), number * 0, tl.min(pivots, 0)
    smallest, greatest = tl.full([], GREATEST, tl.int32), tl.full([], LOWEST, tl.int32)
    while first < number:
        keys, tokens = load_parts(rows, b, j, first, number, TILE)
        w = tl.where(counting, 1.0, weight(from_ordered_key(keys), largest, inverse_temperature))
        amount += tl.sum(tl.where(keys[None, :] >= pivots[:, None], w[None, :], 0.0), 1)
        smallest = tl.minimum(smallest, tl.min(tl.where(keys >= low, keys, GREATEST), 0))
        greatest = tl.maximum(greatest, tl.max(tl.where(keys <= high, keys, LOWEST), 0))
        first += TILE
    return amount, smallest, greatest


@triton.jit
def find_cutoff(rows, b, j, part_keys, largest, total, temperature, top_k, top_p, min_p, TILE: tl.constexpr):
    """(the key of the smallest logit that top-k and then top-p keep, if that is above what min-p cuts off; the number of
    listed logits, all from some key below it on, or -1 if these are not listed). ``total``: the row's weight."""
    inverse_temperature, top = inverse(temperature), ordered_key(largest)
    # `counting`: what is wanted at or above the cutoff is a number. Else it is a weight, not known yet if negative.
    counting, weighing = top_k > 0.0, top_p < 1.0
    wanted = tl.where(counting, top_k, tl.where(weighing, top_p * total, INFINITY))
    # The cutoff is in low .. high, or if it is below in least .. low - 1. What lies beyond ``high`` amounts to ``above``.
    low = nth_of(part_keys, tl.where(counting, top_k, LIKELY))
    least = tl.where(weighing, least_for_top_p(rows, largest, total, temperature, top_p), LOWEST)
    if (counting | weighing) == 0:
        low = ordered_key(min_p_cutoff(largest, temperature, min_p))
    low = tl.maximum(low, LOWEST + 1)
    least = tl.where(counting | (weighing == 0), low, tl.minimum(tl.maximum(least, LOWEST + 1), low))
    high, above, turn, size, working = top, tl.full([], 0.0, tl.float32), low * 0, low * 0, True
    while working:
        number = list_parts(rows, b, j, part_keys, low)
        size, both, former = list_logits(rows, b, j, number, low, high, TILE), False, low
        if size <= LISTED:
            both = counting & weighing & (high == top)  # the list has all that top-k keeps, so top-p's share is known
            most = tl.where(counting, wanted - above, INFINITY)
            limited = weighing & (counting == 0)
            left = tl.where(limited, (tl.where(limited, wanted - above, 0.0) * UNIT).to(tl.int64), ALL)
            share = tl.where(both | (wanted < 0.0), top_p, -1.0)
            if size <= FEW:
                key, mass = least_kept(rows, b, j, size, largest, inverse_temperature, most, left, share, FEW)
            else:
                key, mass = least_kept(rows, b, j, size, largest, inverse_temperature, most, left, share, LISTED)
            certain = (low == least) | (mass >= left)
            above = tl.where(certain, above, above + mass.to(tl.float32) * (1.0 / UNIT))
            size = tl.where(certain & (high == top), size, -1)
            low, high = tl.where(certain, key, least), tl.where(certain, key, low - 1)
        else:
            pivots = pivots_of(low, high, turn)
            amount, smallest, greatest = weigh(
                rows, b, j, number, pivots, high, largest, inverse_temperature, counting, TILE
            )
            wanted = tl.where(wanted < 0.0, top_p * tl.max(amount, 0), wanted)
            enough = amount >= wanted
            certain = (low == least) | (tl.max(enough.to(tl.int32), 0) > 0)
            low = tl.where(certain, tl.maximum(smallest, tl.max(tl.where(enough, pivots, low), 0)), least)
            high = tl.minimum(greatest, tl.min(tl.where(enough, high, pivots - 1), 0))
            above = tl.maximum(above, tl.max(tl.where(enough, 0.0, amount), 0))
            size, turn = tl.full([], -1, tl.int32), turn + 1
        least = tl.where(low < former, least, low)
        if low >= high:
            working = counting & weighing & (both == 0)
            if working:  # top-p of what top-k keeps
                least, high, above, turn = low, top, tl.full([], 0.0, tl.float32), low * 0
                wanted = tl.full([], -1.0, tl.float32)
            counting = counting & (working == 0)
    return low, size
