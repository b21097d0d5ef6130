"""The launch ``sums`` of rule ``block``: the masses of those residuals max(0, w p - q) on which its decision depends.

A prefix with joint ratio w is kept with probability mass / (mass + 1 - w), of which the mass is at most w. So it is
kept whatever the mass is if w = 1, and not kept if its random number is not below w. Of the rows after the longest
prefix that is kept for sure, those are left whose random number is below w: on average 1.3 of 8.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .core import joint_ratio, keep_probability, residual, sums_of_blocks
from .dependent import let_next_begin
from .random import accept_noise
from .rows import tokens_of
from .verify import load_p_and_q
from .walk import RECOVER, WALKING, examine, load_ending, load_statistics, load_tested

# What w is multiplied by before a random number is compared with it, since a mass, rounded, might be above w.
MARGIN = tl.constexpr(1.000001)


@triton.jit
def test_prefix(step, examined, b, j, w):
    """Of the prefix of the first j drafts, with joint ratio w: (its random number, whether it is kept for sure, whether
    that depends on the mass of row j's residual)."""
    sampling = step.target.sampling
    u = accept_noise(tl.load(sampling.seed_ptr + b), tl.load(sampling.position_ptr + b), tl.maximum(j - 1, 0))
    state, flags, picked = load_ending(step, examined, b, j)
    weighed = (state == RECOVER) & (w < 1.0)
    # The empty prefix always passes; the others are tested with the noise of their last draft.
    return u, (j == 0) | (w == 1.0) | ((state != RECOVER) & (u < w)), weighed & (u < w * MARGIN) & (j > 0)


@triton.jit
def walk_over(step, examined, b, j, w):
    """(row j + 1, its joint ratio, whether there is such a row)."""
    log_p, log_q = load_tested(step, examined, b, j)
    state = tl.load(examined.state_ptr + b * (step.num_drafts + 1) + j)
    return j + 1, joint_ratio(w, log_p, log_q), state == WALKING


@triton.jit
def kept_for_sure(step, examined, b):
    """The longest prefix that is kept whatever the masses are."""
    j, w, walking, sure = b * 0, tl.full([], 1.0, tl.float32), True, b * 0
    while walking:
        u, kept, depends = test_prefix(step, examined, b, j, w)
        sure = tl.where(kept, j, sure)
        j, w, walking = walk_over(step, examined, b, j, w)
    return sure


@triton.jit
def walk_jointly(step, examined, b, mass_ptr, BLOCKS: tl.constexpr):
    """Finds the longest prefix of the drafts that passes its test. Returns (the row after it, its joint ratio)."""
    blocks, sure = tl.arange(0, BLOCKS), kept_for_sure(step, examined, b)
    j, w, walking = b * 0, tl.full([], 1.0, tl.float32), True
    end, end_w = j, w
    while walking:
        u, kept, depends = test_prefix(step, examined, b, j, w)
        if depends & (j > sure):
            at = (b * step.num_drafts + j) * step.target.num_blocks
            mass = tl.load(mass_ptr + at + blocks, mask=blocks < step.target.num_blocks, other=0.0)
            kept = u < keep_probability(w, tl.sum(mass, 0))
        end, end_w = tl.where(kept, j, end), tl.where(kept, w, end_w)
        j, w, walking = walk_over(step, examined, b, j, w)
    return end, end_w


@triton.jit
def sums_kernel(
    step,  # Step
    examined,  # Examined: out. Every program of a sequence writes the same, so that none has to wait for another.
    mass_ptr,  # [B, K, blocks] out
    outputs,  # as in ``decide``: log-probabilities of the drafts
    RULE: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    VISITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (part of the blocks, sequence)."""
    let_next_begin(DEPENDENT)
    part, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    j, state = b * 0, tl.full([], WALKING, tl.int32)
    while state == WALKING:
        j, state = examine(step, examined, b, j, None, outputs, RULE, BLOCKS, ROWS, VISITS, DEPENDENT)
    sure = kept_for_sure(step, examined, b)
    j, w, walking = b * 0, tl.full([], 1.0, tl.float32), True
    num_blocks = step.target.num_blocks
    while walking:
        u, kept, depends = test_prefix(step, examined, b, j, w)
        if depends & (j > sure):
            p_lse, p_cutoff, q_lse, q_cutoff = load_statistics(step, examined, b, j)
            first = part * VISITS
            while first < num_blocks:
                block = first + tl.arange(0, VISITS)
                p, q = load_p_and_q(step, b, j, tokens_of(block), True, p_lse, p_cutoff, q_lse, q_cutoff)
                at = (b * step.num_drafts + j) * num_blocks + block
                tl.store(mass_ptr + at, sums_of_blocks(residual(w, p, q), False), mask=block < num_blocks)
                first += tl.num_programs(0) * VISITS
        j, w, walking = walk_over(step, examined, b, j, w)
