"""What one launch finds out about every row of a step on its own, and the walk over the rows that comes after it.

Whether a draft is kept depends on nothing before it, except with rule ``block``, where that decides how much it weighs.
So one program for each (sequence, row) merges the row's statistics and tests its draft, all rows at once. What is left
to do one row after another is a comparison of numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .core import (
    BLOCK_RULE,
    COUPLED_RULE,
    DRAFT_FLAG_FACTOR,
    DRAFT_ZERO_PROBABILITY,
    INFINITY,
    accept,
    accept_noise,
    inverse,
    log_probability,
    row_fault,
)
from .draw import argmax, race_winner
from .rows import load_limit, load_row, load_token
from .verify import load_draft, load_q, log_q_of

# The state of a row.
DONE = tl.constexpr(0)  # a walk ends here, and the token is known, or there is none
WALKING = tl.constexpr(1)  # its draft is kept; with rule `block`, it may be
DRAW = tl.constexpr(2)  # a walk ends here, and a token is to be drawn from p
RECOVER = tl.constexpr(3)  # a walk ends here, and a token is to be drawn from max(0, w p - q)
STATES = tl.constexpr(4)


class Examined(NamedTuple):
    """Pointers to what is known of rows (b, j), each [B, K+1]. Of rows without a use nothing is written."""

    state_ptr: Any
    flags_ptr: Any  # status flags
    picked_ptr: Any  # greedy sequences and rule `coupled`: the target's token, which a draft must be; -1: none
    p_lse_ptr: Any
    p_cutoff_ptr: Any
    q_lse_ptr: Any
    q_cutoff_ptr: Any
    log_p_ptr: Any  # of the row's draft
    log_q_ptr: Any


@triton.jit
def examine_pick(step, examined, b, j, x, fault, token):
    """Of a sequence that accepts the target's own token only: whether the draft x is that ``token``."""
    at = b * (step.num_drafts + 1) + j
    tl.store(examined.state_ptr + at, tl.where((fault == 0) & (x == token), WALKING, DONE))
    tl.store(examined.picked_ptr + at, token)


@triton.jit
def examine_draft(step, examined, b, j, x, fault, flags, p_lse, p_cutoff, RULE: tl.constexpr, BLOCKS: tl.constexpr):
    """Of any other: the test of the draft x, and what it takes to weigh the residual. Returns the row's flags."""
    at = b * (step.num_drafts + 1) + j
    temperature = tl.load(step.target.sampling.temperature_ptr + b)
    seed, position = tl.load(step.target.sampling.seed_ptr + b), tl.load(step.target.sampling.position_ptr + b)
    drafted = (fault == 0) & (x >= 0)
    log_p, log_q = tl.full([], -INFINITY, tl.float32), tl.full([], 0.0, tl.float32)
    if drafted:
        logit, raw = load_token(step.target, b, j, x)
        log_p = log_probability(logit, inverse(temperature), p_lse, p_cutoff)
        q_lse, q_cutoff, q_fault = load_q(step, b, j, BLOCKS)
        log_q = log_q_of(step, b, j, x, q_lse, q_cutoff)
        tl.store(examined.q_lse_ptr + at, q_lse)
        tl.store(examined.q_cutoff_ptr + at, q_cutoff)
        drafted = q_fault == 0
        flags = tl.where(drafted & (log_q == -INFINITY), DRAFT_ZERO_PROBABILITY, q_fault * DRAFT_FLAG_FACTOR)
    kept = drafted & (log_q != -INFINITY)
    if RULE != BLOCK_RULE:
        kept = kept & accept(accept_noise(seed, position, j), log_p, log_q)
    state = tl.where(fault != 0, DONE, tl.where(drafted, RECOVER, DRAW))
    tl.store(examined.state_ptr + at, tl.where(kept, WALKING, state))
    tl.store(examined.picked_ptr + at, tl.full([], -1, tl.int64))
    tl.store(examined.p_lse_ptr + at, p_lse)
    tl.store(examined.p_cutoff_ptr + at, p_cutoff)
    tl.store(examined.log_p_ptr + at, log_p)
    tl.store(examined.log_q_ptr + at, log_q)
    return flags


@triton.jit
def examine(step, examined, b, j, score_ptr, winner_ptr, RULE: tl.constexpr, BLOCKS: tl.constexpr):
    """Stores what there is to know of row j. Returns the token that a walk over this row emits, -1 if there is none."""
    temperature = tl.load(step.target.sampling.temperature_ptr + b)
    x, flags = load_draft(step, b, j)
    largest, p_lse, p_cutoff, mass, block_max = load_row(step.target, b, j, BLOCKS)
    fault = row_fault(largest)
    flags = tl.where(fault == 0, flags, fault)
    token = x
    if temperature == 0.0:
        token = tl.full([], -1, tl.int64)
        if fault == 0:
            token = argmax(step.target, b, j, block_max, largest, BLOCKS)
        examine_pick(step, examined, b, j, x, fault, token)
    else:
        if RULE == COUPLED_RULE:
            token = tl.full([], -1, tl.int64)
            if fault == 0:
                token = race_winner(step.target, b, j, score_ptr, winner_ptr, block_max, largest, BLOCKS)
            examine_pick(step, examined, b, j, x, fault, token)
        else:
            flags = examine_draft(step, examined, b, j, x, fault, flags, p_lse, p_cutoff, RULE, BLOCKS)
    tl.store(examined.flags_ptr + b * (step.num_drafts + 1) + j, flags)
    return token


@triton.jit
def load_statistics(step, examined, b, j):
    """(lse and cutoff of p, lse and cutoff of q) of a row with a draft."""
    at = b * (step.num_drafts + 1) + j
    p_lse, p_cutoff = tl.load(examined.p_lse_ptr + at), tl.load(examined.p_cutoff_ptr + at)
    return p_lse, p_cutoff, tl.load(examined.q_lse_ptr + at), tl.load(examined.q_cutoff_ptr + at)


@triton.jit
def load_tested(step, examined, b, j):
    """log p and log q of the row's draft."""
    at = b * (step.num_drafts + 1) + j
    return tl.load(examined.log_p_ptr + at), tl.load(examined.log_q_ptr + at)


@triton.jit
def load_ending(step, examined, b, j):
    """(the state of row j if a walk ends there, also if its draft might be kept; its status flags; its ``picked``)."""
    at = b * (step.num_drafts + 1) + j
    state = tl.load(examined.state_ptr + at)
    state = tl.where(state == WALKING, RECOVER, state)
    return state, tl.load(examined.flags_ptr + at), tl.load(examined.picked_ptr + at)


@triton.jit
def walk(step, examined, b, first, ROWS: tl.constexpr):
    """Walks from row ``first`` on. Returns (the row where that ends, its state). The last row that counts has no draft,
    so every walk ends. A row that is walked over has no status flags."""
    row = tl.arange(0, ROWS)
    needed = (row >= first) & (row <= load_limit(step.num_drafts_ptr, b, step.num_drafts))
    state = tl.load(examined.state_ptr + b * (step.num_drafts + 1) + row, mask=needed, other=WALKING)
    end = tl.min(tl.where(state == WALKING, ROWS * STATES, row * STATES + state), 0)  # both in one reduction
    return b * 0 + end // STATES, end % STATES
