"""Stores what a sequence emits, and its log-probabilities."""

from __future__ import annotations

import triton
import triton.language as tl

from .core import inverse, log_probability, merge
from .rows import blocks_of, load_token


@triton.jit
def load_raw_lse(rows, b, j, there, BLOCKS: tl.constexpr):
    """[N] lse of the raw logits of rows j [N] at temperature 1."""
    block = tl.arange(0, BLOCKS)
    at = blocks_of(rows, b, j)[:, None] + block[None, :]
    inside = there[:, None] & (block < rows.num_blocks)[None, :]
    block_max = tl.load(rows.raw_max_ptr + at, mask=inside, other=float("-inf"))
    block_sum = tl.load(rows.raw_sum_ptr + at, mask=inside, other=0.0)
    largest, lse, mass = merge(block_max, block_sum, tl.full([], 1.0, tl.float32), 1)
    return lse


@triton.jit
def store_log_probs(step, examined, b, j, log_p, raw, needed, drafted, outputs, BLOCKS: tl.constexpr):
    """Stores the log-probabilities of the drafts of rows j [N], if they are wanted, and what those of other tokens of
    the rows that are ``needed`` take; ``raw``: the drafts' raw logits."""
    tokens_ptr, num_accepted_ptr, status_ptr, num_emitted_ptr, log_probs_ptr, raw_log_probs_ptr = outputs
    if log_probs_ptr is not None:
        at, raw_lse = b * (step.num_drafts + 1) + j, load_raw_lse(step.target, b, j, needed, BLOCKS)
        tl.store(examined.raw_lse_ptr + at, raw_lse, mask=needed)
        tl.store(log_probs_ptr + at, log_p, mask=drafted)
        tl.store(raw_log_probs_ptr + at, raw - raw_lse, mask=drafted)


@triton.jit
def emit(step, examined, b, j, status, token, outputs, ROWS: tl.constexpr):
    """Stores what a sequence emits: its first ``j`` drafts, whose log-probabilities are stored already, then ``token``
    unless that is -1."""
    tokens_ptr, num_accepted_ptr, status_ptr, num_emitted_ptr, log_probs_ptr, raw_log_probs_ptr = outputs
    first, num_rows = tl.full([], 0, tl.int32), step.num_drafts + 1
    while first < num_rows:
        row = first + tl.arange(0, ROWS)
        drafts = tl.load(step.target.sampling.drafts_ptr + b * step.num_drafts + row, mask=row < j, other=-1)
        tl.store(tokens_ptr + b * num_rows + row, tl.where(row == j, token, drafts), mask=row < num_rows)
        if log_probs_ptr is not None:
            rest = (row >= j) & (row < num_rows)
            tl.store(log_probs_ptr + b * num_rows + row, float("nan"), mask=rest)
            tl.store(raw_log_probs_ptr + b * num_rows + row, float("nan"), mask=rest)
        first += ROWS
    tl.store(num_accepted_ptr + b, j)
    tl.store(status_ptr + b, status)
    tl.store(num_emitted_ptr + b, j + tl.where(token >= 0, 1, 0))
    if log_probs_ptr is not None:
        tl.debug_barrier()  # NaN was stored where this token's are
        if token >= 0:
            temperature, at = tl.load(step.target.sampling.temperature_ptr + b), b * num_rows + j
            logit, raw = load_token(step.target, b, j, token)
            lse, cutoff = tl.load(examined.p_lse_ptr + at), tl.load(examined.p_cutoff_ptr + at)
            log_p = tl.where(temperature == 0.0, 0.0, log_probability(logit, inverse(temperature), lse, cutoff))
            tl.store(log_probs_ptr + at, log_p)
            tl.store(raw_log_probs_ptr + at, raw - tl.load(examined.raw_lse_ptr + at))
