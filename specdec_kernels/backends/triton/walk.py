"""What a step finds out about its rows, and where a walk over them ends.

Whether a draft is kept depends on nothing before it, except with rule ``block``, where that decides how much it weighs.
So a program examines all rows of a sequence at once: it merges their statistics and tests their drafts. What is left to
do one row after another is a comparison of numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .core import (
    BLOCK,
    BLOCK_RULE,
    COUPLED_RULE,
    DRAFT_FLAG_FACTOR,
    DRAFT_ZERO_PROBABILITY,
    INFINITY,
    accept,
    inverse,
    log_probability,
    row_fault,
)
from .dependent import wait_for_earlier
from .draw import race_winner
from .emit import store_log_probs
from .random import accept_noise
from .rows import load_block, load_limit, load_rows, load_token
from .verify import load_draft, load_q_logits

# The state of a row.
DONE = tl.constexpr(0)  # a walk ends here, and the token is known, or there is none
WALKING = tl.constexpr(1)  # its draft is kept; with rule `block`, it may be
DRAW = tl.constexpr(2)  # a walk ends here, and a token is to be drawn from p
RECOVER = tl.constexpr(3)  # a walk ends here, and a token is to be drawn from max(0, w p - q)
STATES = tl.constexpr(4)

MOST_PICKED = tl.constexpr(4)  # rows that are read at once for greedy tokens; for more, ``decide`` would be too long


class Examined(NamedTuple):
    """Pointers to what is known of rows (b, j), each [B, K+1]: scratch, of which a program reads what it wrote itself,
    but for rule ``block``. Of rows without a use nothing is written."""

    state_ptr: Any
    flags_ptr: Any  # status flags
    picked_ptr: Any  # greedy sequences and rule `coupled`: the target's token, which a draft must be; -1: none
    p_lse_ptr: Any
    p_cutoff_ptr: Any
    q_lse_ptr: Any
    q_cutoff_ptr: Any
    log_p_ptr: Any  # of the row's draft
    log_q_ptr: Any
    raw_lse_ptr: Any  # of the raw logits at temperature 1; None unless log-probabilities are wanted


@triton.jit
def greedy_tokens(rows, b, j, x, largest, block_max, ROWS: tl.constexpr, SOME: tl.constexpr):
    """[ROWS] tokens with the largest logits of the rows j, the lowest ids of ties; -1 where there is none, and after a
    row that is not the draft x. SOME rows are read at a time."""
    row, one = tl.arange(0, ROWS), tl.arange(0, SOME)
    every = tl.arange(0, block_max.shape[1])
    block = tl.min(tl.where(block_max == largest[:, None], every[None, :], block_max.shape[1]), 1)
    whole = row_fault(largest) == 0
    tokens, first, walking = tl.full([ROWS], -1, tl.int64), tl.full([], 0, tl.int32), True
    while walking:
        chosen = row[None, :] == (first + one)[:, None]
        there = tl.max((chosen & whole[None, :]).to(tl.int32), 1) > 0
        its_block = tl.where(there, tl.sum(tl.where(chosen, block[None, :], 0), 1), rows.num_blocks)
        its_row = tl.sum(tl.where(chosen, j[None, :], 0), 1)
        its_largest = tl.sum(tl.where(chosen & whole[None, :], largest[None, :], 0.0), 1)
        logits = load_block(rows, b, its_row[:, None], its_block)
        place = tl.min(tl.where(logits == its_largest[:, None], tl.arange(0, BLOCK)[None, :], BLOCK), 1)
        token = tl.where(there, its_block * BLOCK + place, -1)
        token = tl.max(tl.where(chosen, token[:, None], -1), 0).to(tl.int64)
        tokens = tl.where((row >= first) & (row < first + SOME), token, tokens)
        first += SOME
        walking = (first < ROWS) & (tl.max(((row < first) & (tokens != x)).to(tl.int32), 0) == 0)
    return tokens


@triton.jit
def load_q_stats(step, b, j, there, BLOCKS: tl.constexpr):
    """([ROWS] lse, cutoffs and faults) of rows j of q; zeros if q is one-hot."""
    if step.draft.ptr is None:
        zero = tl.zeros(j.shape, tl.float32)
        return zero, zero, tl.zeros(j.shape, tl.int32)
    elif step.draft_lse_ptr is None:
        largest, lse, cutoff, block_max = load_rows(step.draft, b, j, there, BLOCKS)
        return lse, cutoff, row_fault(largest * inverse(tl.load(step.draft.sampling.temperature_ptr + b)))
    else:
        # draft_step returns NaN for a row that has no distribution.
        lse = tl.load(step.draft_lse_ptr + b * step.num_drafts + j, mask=there, other=0.0)
        cutoff = tl.load(step.draft_cutoff_ptr + b * step.num_drafts + j, mask=there, other=0.0)
        return lse, cutoff, row_fault(lse)


@triton.jit
def examine(
    step, examined, b, first, raced, outputs, RULE: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    VISITS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Examines ROWS rows from row ``first`` on, and walks over them. Returns (the row where that ends, its state), or
    (the row after these, WALKING). The last row that counts has no draft, so every walk ends. A row that is walked over
    has no status flags."""
    target, limit = step.target, load_limit(step.num_drafts_ptr, b, step.num_drafts)
    row = first + tl.arange(0, ROWS)
    needed, j = row <= limit, tl.minimum(row, step.num_drafts)
    temperature, seed = tl.load(target.sampling.temperature_ptr + b), tl.load(target.sampling.seed_ptr + b)
    position, inverse_temperature = tl.load(target.sampling.position_ptr + b), inverse(temperature)
    x, flags = load_draft(step, b, row)
    logit, raw = load_token(target, b, j, x)
    q_logit = tl.zeros([ROWS], tl.float32)
    if step.draft.ptr is not None:
        q_logit = load_q_logits(step, b, tl.minimum(row, step.num_drafts - 1), x)
    u = accept_noise(seed, position, row)
    wait_for_earlier(DEPENDENT)

    largest, p_lse, p_cutoff, block_max = load_rows(target, b, row, needed, BLOCKS)
    fault = row_fault(largest * inverse_temperature)
    flags = tl.where(fault == 0, flags, fault)
    greedy = temperature == 0.0
    picked, state = tl.full([ROWS], -1, tl.int64), tl.full([ROWS], DONE, tl.int32)
    log_p = tl.where(x >= 0, log_probability(logit, inverse_temperature, p_lse, p_cutoff), -INFINITY)
    log_q, q_lse, q_cutoff = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    if greedy:
        some: tl.constexpr = min(ROWS, VISITS, MOST_PICKED)
        picked = greedy_tokens(target, b, j, x, largest, block_max, ROWS, some)
        log_p = tl.zeros([ROWS], tl.float32)
    elif RULE == COUPLED_RULE:
        winner = race_winner(target, b, row[:, None], raced, block_max, largest, 1)
        picked = tl.where(fault == 0, winner, -1)
    else:
        drafted = (fault == 0) & (x >= 0)
        q_lse, q_cutoff, q_fault = load_q_stats(step, b, row, row < limit, BLOCKS)
        if step.draft.ptr is not None:
            log_q = log_probability(q_logit, inverse_temperature, q_lse, q_cutoff)
        impossible = drafted & (q_fault == 0) & (log_q == -INFINITY)
        flags = tl.where(drafted, tl.where(impossible, DRAFT_ZERO_PROBABILITY, q_fault * DRAFT_FLAG_FACTOR), flags)
        drafted = drafted & (q_fault == 0)
        kept = drafted & (log_q != -INFINITY)
        if RULE != BLOCK_RULE:
            kept = kept & accept(u, log_p, log_q)
        state = tl.where(fault != 0, DONE, tl.where(drafted, RECOVER, DRAW))
        state = tl.where(kept, WALKING, state)
    if greedy | (RULE == COUPLED_RULE):
        state = tl.where((fault == 0) & (x >= 0) & (x == picked), WALKING, DONE)

    at = b * (step.num_drafts + 1) + row
    tl.store(examined.state_ptr + at, state, mask=needed)
    tl.store(examined.flags_ptr + at, flags, mask=needed)
    tl.store(examined.picked_ptr + at, picked, mask=needed)
    tl.store(examined.p_lse_ptr + at, p_lse, mask=needed)
    tl.store(examined.p_cutoff_ptr + at, p_cutoff, mask=needed)
    tl.store(examined.q_lse_ptr + at, q_lse, mask=needed)
    tl.store(examined.q_cutoff_ptr + at, q_cutoff, mask=needed)
    tl.store(examined.log_p_ptr + at, log_p, mask=needed)
    tl.store(examined.log_q_ptr + at, log_q, mask=needed)
    store_log_probs(step, examined, b, row, log_p, raw, needed, row < limit, outputs, BLOCKS)
    tl.debug_barrier()  # the program's other threads see what was stored
    over = (state == WALKING) | (row > limit)
    end = tl.min(tl.where(over, ROWS * STATES, tl.arange(0, ROWS) * STATES + state), 0)  # both in one reduction
    return first + end // STATES, tl.where(end == ROWS * STATES, WALKING, end % STATES)


@triton.jit
def load_statistics(step, examined, b, j):
    """(lse and cutoff of p, lse and cutoff of q) of a row."""
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
