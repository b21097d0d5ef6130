"""Draws from rows whose statistics are known: greedily, in two levels, and by the one-level race of rule `coupled`."""

from __future__ import annotations

import triton
import triton.language as tl

from .core import BLOCK, RACE, exponential, inverse, race, random_bits, random_bits_of, uniform, weight
from .rows import load_block, load_cutoff, load_row, stats_row, target_ids


@triton.jit
def argmax(rows, b, j, block_max, largest, BLOCKS: tl.constexpr):
    """The token with the largest logit, the lowest id of a tie."""
    block = tl.min(tl.where(block_max == largest, tl.arange(0, BLOCKS), BLOCKS), 0)
    x = load_block(rows, b, j, block)
    return tl.cast(block, tl.int64) * BLOCK + tl.min(tl.where(x == largest, tl.arange(0, BLOCK), BLOCK), 0)


@triton.jit
def draw(rows, b, j, BLOCKS: tl.constexpr, BLOCK_STREAM: tl.constexpr, TOKEN_STREAM: tl.constexpr):
    """Draws a token from row (b, j) in two levels: first a block, then a token of that block."""
    sampling = rows.sampling
    temperature, seed = tl.load(sampling.temperature_ptr + b), tl.load(sampling.seed_ptr + b)
    position = tl.load(sampling.position_ptr + b)
    largest, lse, cutoff, mass, block_max = load_row(rows, b, j, BLOCKS)
    block = race(mass, 0, BLOCKS, seed, position, j, BLOCK_STREAM)
    its_max = tl.sum(tl.where(tl.arange(0, BLOCKS) == block, block_max, 0.0), 0)
    x = load_block(rows, b, j, block)
    w = tl.where(x >= cutoff, weight(x, its_max, inverse(temperature)), 0.0)
    first = tl.cast(block, tl.int64) * BLOCK
    return first + race(w, first, BLOCK, seed, position, j, TOKEN_STREAM)


@triton.jit
def race_block(rows, b, j, block, score_ptr, winner_ptr):
    """Rule `coupled`: one block's part of the race of row (b, j), over single tokens, with the noise of their target
    ids and of the row's absolute position. Stores the best w / E, where w is relative to the block's largest logit, and
    its token, at the index that the block has in the statistics."""
    at = stats_row(rows, b, j) * rows.num_blocks + block
    its_max = tl.load(rows.max_ptr + at)
    cutoff = load_cutoff(rows, b, j)
    first = block * BLOCK
    x = load_block(rows, b, j, block)
    seed, position = tl.load(rows.sampling.seed_ptr + b), tl.load(rows.sampling.position_ptr + b) + j
    zero = tl.full([], 0, tl.int32)
    if rows.d2t_ptr is None:
        bits = random_bits(first, BLOCK, seed, position, zero, RACE)
    else:
        bits = random_bits_of(target_ids(rows, first + tl.arange(0, BLOCK)), seed, position, zero, RACE)
    temperature = tl.load(rows.sampling.temperature_ptr + b)
    w = tl.where(x >= cutoff, weight(x, its_max, inverse(temperature)), 0.0)
    score = w / exponential(uniform(bits))
    tl.store(score_ptr + at, tl.max(score, 0))
    tl.store(winner_ptr + at, first + tl.argmax(score, 0))


@triton.jit
def race_winner(rows, b, j, score_ptr, winner_ptr, block_max, largest, BLOCKS: tl.constexpr):
    """The token that won the race of row (b, j), from the parts that ``race_block`` stored."""
    at, block = stats_row(rows, b, j) * rows.num_blocks, tl.arange(0, BLOCKS)
    score = tl.load(score_ptr + at + block, mask=block < rows.num_blocks, other=0.0)
    temperature = tl.load(rows.sampling.temperature_ptr + b)
    best = tl.argmax(score * weight(block_max, largest, inverse(temperature)), 0)
    return tl.load(winner_ptr + at + best)
