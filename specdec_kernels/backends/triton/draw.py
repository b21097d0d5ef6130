"""Draws from rows whose statistics are known: greedily, in two levels, and by the one-level race of rule `coupled`."""

from __future__ import annotations

import triton
import triton.language as tl

from .core import BLOCK, INFINITY, inverse, weight
from .random import (
    DRAFT_BLOCK,
    DRAFT_TOKEN,
    RACE,
    exponential,
    race,
    race_of_blocks,
    random_bits,
    random_bits_of,
    uniform,
)
from .rows import blocks_of, load_block, load_cutoff, load_row, place_of, target_ids, tokens_of


@triton.jit
def argmax(rows, b, j, block_max, largest, BLOCKS: tl.constexpr):
    """The token with the largest logit, the lowest id of a tie."""
    block = tl.min(tl.where(block_max == largest, tl.arange(0, BLOCKS), BLOCKS), 0)
    x = load_block(rows, b, j, block)
    return tl.cast(block, tl.int64) * BLOCK + tl.min(tl.where(x == largest, tl.arange(0, BLOCK), BLOCK), 0)


@triton.jit
def draw(rows, b, j, BLOCKS: tl.constexpr):
    """Drafts a token from row (b, j) in two levels: first a block, then a token of that block."""
    sampling = rows.sampling
    temperature, seed = tl.load(sampling.temperature_ptr + b), tl.load(sampling.seed_ptr + b)
    position = tl.load(sampling.position_ptr + b)
    largest, lse, cutoff, mass, block_max = load_row(rows, b, j, BLOCKS)
    block = race_of_blocks(mass, seed, position, j, DRAFT_BLOCK)
    its_max = tl.sum(tl.where(tl.arange(0, BLOCKS) == block, block_max, 0.0), 0)
    x = load_block(rows, b, j, block)
    w = tl.where(x >= cutoff, weight(x, its_max, inverse(temperature)), 0.0)
    first = tl.cast(block, tl.int64) * BLOCK
    return first + race(w, first, BLOCK, seed, position, j, DRAFT_TOKEN)


@triton.jit
def race_tokens(rows, b, j, block, x, its_max, raced, there):
    """Rule `coupled`: the part of [N] consecutive blocks, whose logits are x [N, 1024], in the race of row (b, j): over
    single tokens, with the noise of their target ids and of the row's absolute position. Stores the best w / E of each
    block, where w is relative to the block's largest logit, and its token, at the index of the block's statistics."""
    score_ptr, winner_ptr = raced
    at = blocks_of(rows, b, j) + block
    seed = tl.load(rows.sampling.seed_ptr + b)
    position = tl.load(rows.sampling.position_ptr + b) + place_of(rows.sampling, b, j)
    zero, index = tl.full([], 0, tl.int32), tokens_of(block)
    if rows.d2t_ptr is None:
        bits = tl.reshape(random_bits(tl.min(index), index.numel, seed, position, zero, RACE), index.shape)
    else:
        bits = random_bits_of(target_ids(rows, index), seed, position, zero, RACE)
    temperature = tl.load(rows.sampling.temperature_ptr + b)
    w = weight(x, its_max[:, None], inverse(temperature))
    kept = (x >= load_cutoff(rows, b, j)) & (w > 0.0)  # a weight is NaN where the row has no distribution
    score = tl.where(kept, w, 0.0) / exponential(uniform(bits))
    tl.store(score_ptr + at, tl.max(score, 1), mask=there)
    tl.store(winner_ptr + at, block * BLOCK + tl.argmax(score, 1), mask=there)


@triton.jit
def race_winner(rows, b, j, raced, block_max, largest, axis: tl.constexpr):
    """The token that won the race of row (b, j), or of several rows j [N, 1], from what ``race_tokens`` stored of its
    blocks, which lie along an axis."""
    score_ptr, winner_ptr = raced
    at, block = blocks_of(rows, b, j), tl.arange(0, block_max.shape[axis])
    if axis == 1:
        block = block[None, :]
    score = tl.load(score_ptr + at + block, mask=block_max > -INFINITY, other=0.0)
    temperature = tl.load(rows.sampling.temperature_ptr + b)
    score *= weight(block_max, tl.expand_dims(largest, axis), inverse(temperature))
    best = tl.argmax(tl.where(score > 0.0, score, 0.0), axis)
    winner = tl.load(winner_ptr + at + block, mask=block == tl.expand_dims(best, axis), other=-1)
    return tl.max(winner, axis).to(tl.int64)
