"""Verification of drafts: p and q of a draft, the weights of the residual, and the walks over a sequence's drafts."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .core import (
    BLOCK,
    COUPLED_RULE,
    DRAFT_FLAG_FACTOR,
    DRAFT_OUT_OF_RANGE,
    DRAFT_ZERO_PROBABILITY,
    INFINITY,
    LOG2E,
    RECOVER_BLOCK,
    RECOVER_TOKEN,
    accept,
    accept_noise,
    inverse,
    joint_ratio,
    keep_probability,
    log_probability,
    probability,
    race,
    residual,
    row_fault,
)
from .draw import argmax, race_winner
from .rows import Rows, adjusted, find, load_block, load_limit, load_row, load_token, masked

# The state of a sequence at a row.
DONE = tl.constexpr(0)  # nothing is left to do
WALKING = tl.constexpr(1)  # this row's draft is to be tested
DRAW = tl.constexpr(2)  # a token is to be drawn from p
RECOVER = tl.constexpr(3)  # a token is to be drawn from max(0, w p - q)


class Step(NamedTuple):
    """A step: its target rows (b, 0 .. K), its drafts (``target.sampling.drafts_ptr``), and q."""

    target: Rows
    draft: Rows  # the logits of q, or NO_ROWS: drafts are one-hot
    draft_cutoff_ptr: Any  # [B, K] from drafting; None: it is among the statistics of ``draft``
    draft_lse_ptr: Any
    num_drafts_ptr: Any  # [B]; None: all K drafts count
    num_drafts: Any  # K
    nothing: None = None  # Triton 3.6 loses the constants of ``target`` and ``draft`` if there is none beside them


@triton.jit
def load_draft(step, b, j):
    """(the draft of row j, -1 if there is none; status flags)."""
    limit = load_limit(step.num_drafts_ptr, b, step.num_drafts)
    x = tl.load(step.target.sampling.drafts_ptr + b * step.num_drafts + j, mask=j < limit, other=-1)
    in_range = (x >= 0) & (x < step.target.vocabulary)
    return tl.where(in_range, x, -1), tl.where(in_range | (x == -1), 0, DRAFT_OUT_OF_RANGE)


@triton.jit
def load_q(step, b, j, BLOCKS: tl.constexpr):
    """(lse, cutoff, fault) of draft row j; zeros if q is one-hot."""
    if step.draft.ptr is None:
        return tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32), tl.full([], 0, tl.int32)
    elif step.draft_lse_ptr is None:
        largest, lse, cutoff, mass, block_max = load_row(step.draft, b, j, BLOCKS)
        return lse, cutoff, row_fault(largest)
    else:
        # draft_step returns NaN for a row that has no distribution.
        lse = tl.load(step.draft_lse_ptr + b * step.num_drafts + j)
        return lse, tl.load(step.draft_cutoff_ptr + b * step.num_drafts + j), row_fault(lse)


@triton.jit
def log_q_of(step, b, j, ids, q_lse, q_cutoff):
    """log q of target ids (a scalar or a vector) in row j. A one-hot q has 0 at the draft, -inf elsewhere."""
    if step.draft.ptr is not None:
        sampling = step.draft.sampling
        listed = (ids >= 0) & (ids < step.target.vocabulary)
        place = ids
        if step.draft.d2t_ptr is not None:
            place, listed = find(step.draft.d2t_ptr, step.draft.vocabulary, ids)
        row_ptr = step.draft.ptr + b * step.draft.stride_b + j * step.draft.stride_j
        x = tl.load(row_ptr + place, mask=listed, other=-INFINITY).to(tl.float32)
        x = masked(x, ids, step.draft, b, j)
        x = tl.where(listed, adjusted(x, ids, sampling, b, j), -INFINITY)
        return log_probability(x, inverse(tl.load(sampling.temperature_ptr + b)), q_lse, q_cutoff)
    else:
        x, flags = load_draft(step, b, j)
        return tl.where(ids == x, 0.0, -INFINITY)


@triton.jit
def examine(step, b, j, BLOCKS: tl.constexpr):
    """(fault of the target row, status flags, whether there is a draft to test, its log p, its log q) of row j."""
    largest, lse, cutoff, mass, block_max = load_row(step.target, b, j, BLOCKS)
    fault = row_fault(largest)
    x, flags = load_draft(step, b, j)
    flags = tl.where(fault == 0, flags, fault)
    drafted = (fault == 0) & (x >= 0)
    log_p, log_q = tl.full([], -INFINITY, tl.float32), tl.full([], 0.0, tl.float32)
    if drafted:
        logit, raw = load_token(step.target, b, j, x)
        log_p = log_probability(logit, inverse(tl.load(step.target.sampling.temperature_ptr + b)), lse, cutoff)
        q_lse, q_cutoff, q_fault = load_q(step, b, j, BLOCKS)
        log_q = log_q_of(step, b, j, x, q_lse, q_cutoff)
        drafted = q_fault == 0
        flags = tl.where(drafted & (log_q == -INFINITY), DRAFT_ZERO_PROBABILITY, q_fault * DRAFT_FLAG_FACTOR)
    return fault, flags, drafted, log_p, log_q


@triton.jit
def residual_weights(step, b, j, w, block, BLOCKS: tl.constexpr):
    """[1024] weights max(0, w p - q) of one block of row j."""
    largest, p_lse, p_cutoff, mass, block_max = load_row(step.target, b, j, BLOCKS)
    q_lse, q_cutoff, q_fault = load_q(step, b, j, BLOCKS)
    p = load_block(step.target, b, j, block)
    p = probability(p, inverse(tl.load(step.target.sampling.temperature_ptr + b)), p_lse, p_cutoff)
    ids = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return residual(w * p, tl.exp2(log_q_of(step, b, j, ids, q_lse, q_cutoff) * LOG2E))


@triton.jit
def residual_masses(step, b, j, w, BLOCKS: tl.constexpr):
    """[BLOCKS] masses of max(0, w p - q) in row j, all computed by one program."""
    mass = tl.zeros([BLOCKS], tl.float32)
    for block in range(0, step.target.num_blocks):
        total = tl.sum(residual_weights(step, b, j, w, block, BLOCKS), 0)
        mass = tl.where(tl.arange(0, BLOCKS) == block, total, mass)
    return mass


@triton.jit
def recover(step, b, j, w, mass, BLOCKS: tl.constexpr):
    """Draws a token from max(0, w p - q), given the masses of its blocks; -1 if there is no mass."""
    seed, position = tl.load(step.target.sampling.seed_ptr + b), tl.load(step.target.sampling.position_ptr + b)
    block = race(mass, 0, BLOCKS, seed, position, j, RECOVER_BLOCK)
    token = tl.full([], -1, tl.int64)
    if block >= 0:
        first = tl.cast(block, tl.int64) * BLOCK
        weights = residual_weights(step, b, j, w, block, BLOCKS)
        place = race(weights, first, BLOCK, seed, position, j, RECOVER_TOKEN)
        token = tl.where(place >= 0, first + place, -1)
    return token


# ---- Walks ---------------------------------------------------------------------------------------------------


@triton.jit
def where_to(fault, drafted):
    """The state of a sequence whose kept prefix ends before this row."""
    return tl.where(fault != 0, DONE, tl.where(drafted, RECOVER, DRAW)).to(tl.int32)


@triton.jit
def walk(step, b, j, status, BLOCKS: tl.constexpr):
    """Rule `token`: walks from row j until a draft is rejected. Returns (row, state, status)."""
    seed, position = tl.load(step.target.sampling.seed_ptr + b), tl.load(step.target.sampling.position_ptr + b)
    state = tl.full([], WALKING, tl.int32)
    while state == WALKING:
        fault, flags, drafted, log_p, log_q = examine(step, b, j, BLOCKS)
        status = status | flags
        kept = drafted & (log_q != -INFINITY) & accept(accept_noise(seed, position, j), log_p, log_q)
        state = tl.where(kept, WALKING, where_to(fault, drafted))
        j = tl.where(kept, j + 1, j)
    return j, state, status


@triton.jit
def walk_jointly(step, b, mass_ptr, BLOCKS: tl.constexpr):
    """Rule `block`: finds the longest prefix that passes its test. Returns (row after it, state, status, its joint
    ratio)."""
    seed, position = tl.load(step.target.sampling.seed_ptr + b), tl.load(step.target.sampling.position_ptr + b)
    blocks = tl.arange(0, BLOCKS)
    j, w, walking = b * 0, tl.full([], 1.0, tl.float32), True
    kept, kept_w = b * 0, tl.full([], 1.0, tl.float32)
    state, status = tl.full([], DRAW, tl.int32), tl.full([], 0, tl.int32)
    while walking:
        fault, flags, drafted, log_p, log_q = examine(step, b, j, BLOCKS)
        keep = w
        if drafted:
            at = (b * step.num_drafts + j) * step.target.num_blocks
            mass = tl.load(mass_ptr + at + blocks, mask=blocks < step.target.num_blocks, other=0.0)
            keep = keep_probability(w, tl.sum(mass, 0))
        # The prefix of j drafts is tested with the noise of its last draft; the empty prefix always passes.
        passed = (j == 0) | (accept_noise(seed, position, j - 1) < keep)
        kept, kept_w = tl.where(passed, j, kept), tl.where(passed, w, kept_w)
        state, status = tl.where(passed, where_to(fault, drafted), state), tl.where(passed, flags, status)
        walking = drafted & (log_q != -INFINITY)
        w = joint_ratio(w, log_p, log_q)
        j += 1
    return kept, state, status, kept_w


@triton.jit
def walk_favourites(step, b, score_ptr, winner_ptr, RULE: tl.constexpr, BLOCKS: tl.constexpr):
    """Greedy decoding, and rule `coupled`: accepts drafts as long as each is the token that the target picks.

    Returns (row of the first difference, status, the token picked there)."""
    temperature = tl.load(step.target.sampling.temperature_ptr + b)
    j, status, walking = b * 0, tl.full([], 0, tl.int32), True
    token = tl.full([], -1, tl.int64)
    while walking:
        largest, lse, cutoff, mass, block_max = load_row(step.target, b, j, BLOCKS)
        fault = row_fault(largest)
        x, flags = load_draft(step, b, j)
        status = status | tl.where(fault == 0, flags, fault)
        token = tl.full([], -1, tl.int64)
        walking = False
        if fault == 0:
            if RULE == COUPLED_RULE:
                if temperature == 0.0:
                    token = argmax(step.target, b, j, block_max, largest, BLOCKS)
                else:
                    token = race_winner(step.target, b, j, score_ptr, winner_ptr, block_max, largest, BLOCKS)
            else:
                token = argmax(step.target, b, j, block_max, largest, BLOCKS)
            walking = x == token
        j = tl.where(walking, j + 1, j)
    return j, status, token
