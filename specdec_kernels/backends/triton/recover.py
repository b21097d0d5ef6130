"""Draws from a residual max(0, w p - q), best block first.

Blocks race with R / E: R is a block's mass of the residual, E its noise. R is at most w P, with P the block's mass of
p, which measuring has found out. So blocks are visited in the order of w P / E until none can win any more: the same
block wins as if all had been weighed. On average, 1 / (the residual's mass) blocks are visited.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .core import INFINITY, RECOVER_BLOCK, inverse, noise_of, probability, sums_of_blocks
from .rows import stats_row
from .verify import race_residual, residual_weights

# What a bound is multiplied by before it is compared, since it is rounded otherwise than what it bounds.
MARGIN = tl.constexpr(1.00001)
COMPARED = tl.constexpr(64)  # keys that all others are compared with at once


@triton.jit
def bounds_of(step, b, j, w, p_lse, E, BLOCKS: tl.constexpr):
    """[BLOCKS] keys: the bits of w P / E, which are in the order of these numbers, with the lowest ones replaced so
    that each key says its block, and that the lower of two equal ones is greater. Negative: no such block."""
    target, block = step.target, tl.arange(0, BLOCKS)
    at, inside = stats_row(target, b, j) * target.num_blocks + block, block < target.num_blocks
    block_max = tl.load(target.max_ptr + at, mask=inside, other=-INFINITY)
    block_sum = tl.load(target.sum_ptr + at, mask=inside, other=0.0)
    inverse_temperature = inverse(tl.load(target.sampling.temperature_ptr + b))
    mass = block_sum * probability(block_max, inverse_temperature, p_lse, -INFINITY)
    bits = (w * mass / E).to(tl.int32, bitcast=True)
    return tl.where(inside, (bits | (BLOCKS - 1)) - block, -1 - block)


@triton.jit
def order(step, b, j, w, p_lse, order_ptr, noise_ptr, BLOCKS: tl.constexpr):
    """Stores the noise of the blocks, and their keys in descending order. Both go through memory, where they take other
    places: otherwise compilers would compute them anew for every place."""
    seed, position = tl.load(step.target.sampling.seed_ptr + b), tl.load(step.target.sampling.position_ptr + b)
    block = tl.arange(0, BLOCKS)
    E = noise_of(block, seed, position, j, RECOVER_BLOCK)
    tl.store(noise_ptr + block, E)
    tl.store(order_ptr + BLOCKS + block, bounds_of(step, b, j, w, p_lse, E, BLOCKS))
    tl.debug_barrier()
    keys, place = tl.load(order_ptr + BLOCKS + block), tl.zeros([BLOCKS], tl.int32)
    some: tl.constexpr = BLOCKS if BLOCKS < COMPARED else COMPARED
    for first in range(0, BLOCKS, some):
        others = tl.load(order_ptr + BLOCKS + first + tl.arange(0, some))
        place += tl.sum((others[:, None] > keys[None, :]).to(tl.int32), 0)
    tl.store(order_ptr + place, keys)
    tl.debug_barrier()


@triton.jit
def recover(
    step, b, j, w, p_lse, p_cutoff, q_lse, q_cutoff, visits, BLOCKS: tl.constexpr, VISITS: tl.constexpr
):  # fmt: skip
    """A token drawn from max(0, w p - q) in row j; -1 if there is no mass. VISITS blocks are weighed at a time."""
    order_ptr, noise_ptr = visits
    order_ptr, noise_ptr = order_ptr + b * 2 * BLOCKS, noise_ptr + b * BLOCKS
    order(step, b, j, w, p_lse, order_ptr, noise_ptr, BLOCKS)
    best, block = tl.full([], 0.0, tl.float32), tl.full([], -1, tl.int32)
    first, visit = tl.full([], 0, tl.int32), tl.arange(0, VISITS)
    bound = tl.full([], INFINITY, tl.float32)  # of the blocks that were not visited
    while bound * MARGIN > best:
        key = tl.load(order_ptr + first + visit, mask=first + visit < BLOCKS, other=-1)
        there, blocks = key >= 0, BLOCKS - 1 - (key & (BLOCKS - 1))
        its_noise = tl.load(noise_ptr + blocks)
        blocks = tl.where(there, blocks, step.target.num_blocks)
        mass = sums_of_blocks(residual_weights(step, b, j, w, blocks, p_lse, p_cutoff, q_lse, q_cutoff), False)
        score = tl.where(there, mass / its_noise, 0.0)
        its_best = tl.max(score, 0)
        its_block = tl.min(tl.where(score == its_best, blocks, 0x7FFFFFFF), 0)  # the lowest of a tie
        better = (its_best > best) | ((its_best == best) & (its_block < block))
        block, best = tl.where(better, its_block, block), tl.maximum(best, its_best)
        first += VISITS
        key = tl.load(order_ptr + first, mask=first < BLOCKS, other=-1)
        bound = tl.where(key >= 0, key | (BLOCKS - 1), 0).to(tl.float32, bitcast=True)
    token = tl.full([], -1, tl.int64)
    if block >= 0:
        token = race_residual(step, b, j, w, block, p_lse, p_cutoff, q_lse, q_cutoff)
    return token
