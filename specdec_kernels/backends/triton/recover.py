"""Draws of a block from p, and from a residual max(0, w p - q), best block first.

Blocks race with R / E: R is a block's mass of the residual, E its noise. R is at most w P, with P the block's mass of
p, which measuring has found out. So blocks are visited in the order of w P / E until none can win any more: the same
block wins as if all had been weighed. On average, 1 / (the residual's mass) blocks are visited.

In a tree, w is the scale of a row after its rejections (core.py): whatever number of siblings was rejected, the
residual is max(0, scale p - q) of the row's own p and q, so that the same bound holds. Its mass as a whole has no such
bound that would decide anything: where the test of another node depends on it, all blocks are visited.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .core import BLOCK, INFINITY, inverse, probability, residual, sums_of_blocks
from .random import RECOVER_BLOCK, noise_of
from .rows import load_blocks, tokens_of
from .verify import load_p_and_q

# What a bound is multiplied by before it is compared, since it is rounded otherwise than what it bounds.
MARGIN = tl.constexpr(1.00001)
COMPARED = tl.constexpr(32)  # keys that all others are compared with at once
NO_TOKEN = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def visits_of(visits, b, BLOCKS: tl.constexpr):
    """A sequence's scratch: (its keys in descending order, and then by block; the noise of its blocks)."""
    order_ptr, noise_ptr = visits
    return order_ptr + b * 2 * BLOCKS, noise_ptr + b * BLOCKS


@triton.jit
def race_blocks(step, b, j, w, p_lse, visits, BLOCKS: tl.constexpr):
    """The block of row j that wins the race of p. Leaves in scratch, for ``best_residual``, the noise of the blocks and
    their keys: the bits of w P / E, which are in the order of these numbers, with the lowest ones replaced so that each
    key says its block, and that the lower of two equal ones is greater. Negative: no such block."""
    order_ptr, noise_ptr = visits_of(visits, b, BLOCKS)
    target, block = step.target, tl.arange(0, BLOCKS)
    seed, position = tl.load(target.sampling.seed_ptr + b), tl.load(target.sampling.position_ptr + b)
    E = noise_of(block, seed, position, j, RECOVER_BLOCK)
    block_max, block_sum = load_blocks(target, b, j, BLOCKS)
    inverse_temperature = inverse(tl.load(target.sampling.temperature_ptr + b))
    score = w * (block_sum * probability(block_max, inverse_temperature, p_lse, None)) / E
    bits = score.to(tl.int32, bitcast=True)
    tl.store(noise_ptr + block, E)
    tl.store(order_ptr + BLOCKS + block, tl.where(block < target.num_blocks, (bits | (BLOCKS - 1)) - block, -1))
    tl.debug_barrier()
    return tl.min(tl.where(score == tl.max(score, 0), block, BLOCKS), 0)


@triton.jit
def order(order_ptr, num_blocks, BLOCKS: tl.constexpr):
    """Stores the keys in descending order. They go through memory, where they take other places: otherwise compilers
    would compute them anew for every place."""
    block = tl.arange(0, BLOCKS)
    keys, place = tl.load(order_ptr + BLOCKS + block), tl.zeros([BLOCKS], tl.int32)
    some: tl.constexpr = BLOCKS if BLOCKS < COMPARED else COMPARED
    for first in range(0, num_blocks, some):
        others = tl.load(order_ptr + BLOCKS + first + tl.arange(0, some))
        place += tl.sum((others[:, None] > keys[None, :]).to(tl.int32), 0)
    tl.store(order_ptr + place, keys, mask=block < num_blocks)
    tl.debug_barrier()


@triton.jit
def without(q, ids, blocks, tokens, gone):
    """q [N, 1024] of the tokens ``ids`` of N blocks, 0 for those among ``tokens`` [NODES] that are ``gone``."""
    here = gone & (tl.max((tokens[:, None] // BLOCK == blocks[None, :]).to(tl.int32), 1) != 0)
    missing = tl.min(tl.where(here, tokens, NO_TOKEN), 0)
    while missing < NO_TOKEN:
        q = tl.where(ids == missing.to(tl.int32), 0.0, q)
        missing = tl.min(tl.where(here & (tokens > missing), tokens, NO_TOKEN), 0)
    return q


@triton.jit
def best_residual(
    step, b, j, w, p_lse, p_cutoff, q_lse, q_cutoff, visits, all_of, tokens, gone, BLOCKS: tl.constexpr,
    VISITS: tl.constexpr,
):  # fmt: skip
    """(The block of row j that wins the race of max(0, w p - q), -1 if that has no mass; in a tree, if ``all_of`` the
    blocks are to be weighed, also the mass; and that of q without those of the ``tokens`` of its nodes that are
    ``gone``). VISITS blocks are weighed at a time. Comes after ``race_blocks``. A chain has no ``tokens``."""
    order_ptr, noise_ptr = visits_of(visits, b, BLOCKS)
    num_blocks = step.target.num_blocks
    order(order_ptr, num_blocks, BLOCKS)
    best, block = tl.full([], 0.0, tl.float32), tl.full([], -1, tl.int32)
    total, left = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    first, visit = tl.full([], 0, tl.int32), tl.arange(0, VISITS)
    bound = tl.full([], INFINITY, tl.float32)  # of the blocks that were not visited
    while bound * MARGIN > best:
        key = tl.load(order_ptr + first + visit, mask=first + visit < num_blocks, other=-1)
        there, blocks = key >= 0, BLOCKS - 1 - (key & (BLOCKS - 1))
        its_noise = tl.load(noise_ptr + blocks)
        blocks = tl.where(there, blocks, num_blocks)
        ids = tokens_of(blocks)
        p, q = load_p_and_q(step, b, j, ids, True, p_lse, p_cutoff, q_lse, q_cutoff)
        mass = sums_of_blocks(residual(w, p, q), False)
        score = tl.where(there, mass / its_noise, 0.0)
        its_best = tl.max(score, 0)
        its_block = tl.min(tl.where(score == its_best, blocks, 0x7FFFFFFF), 0)  # the lowest of a tie
        better = (its_best > best) | ((its_best == best) & (its_block < block))
        block, best = tl.where(better, its_block, block), tl.maximum(best, its_best)
        first += VISITS
        key = tl.load(order_ptr + first, mask=first < num_blocks, other=-1)
        bound = tl.where(key >= 0, key | (BLOCKS - 1), 0).to(tl.float32, bitcast=True)
        if tokens is not None:
            if all_of:
                total += tl.sum(mass, 0)
                left += tl.sum(sums_of_blocks(without(q, ids, blocks, tokens, gone), False), 0)
                bound = tl.where(key >= 0, INFINITY, 0.0)
    return block, total, left
