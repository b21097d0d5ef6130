"""Stores what a sequence emits, and its log-probabilities."""

from __future__ import annotations

import triton
import triton.language as tl

from .core import inverse, log_probability
from .rows import load_merged, load_row, load_token, stats_row


@triton.jit
def store_log_probs(step, b, i, token, outputs, BLOCKS: tl.constexpr):
    """Stores the log-probabilities of a token of row i, if they are wanted; NaN if there is none (-1)."""
    tokens_ptr, num_accepted_ptr, status_ptr, num_emitted_ptr, log_probs_ptr, raw_log_probs_ptr = outputs
    if log_probs_ptr is not None:
        log_p, raw_log_p = tl.full([], float("nan"), tl.float32), tl.full([], float("nan"), tl.float32)
        target = step.target
        if token >= 0:
            temperature = tl.load(target.sampling.temperature_ptr + b)
            logit, raw = load_token(target, b, i, token)
            largest, lse, cutoff, mass, block_max = load_row(target, b, i, BLOCKS)
            log_p = tl.where(temperature == 0.0, 0.0, log_probability(logit, inverse(temperature), lse, cutoff))
            largest, lse, mass, block_max = load_merged(
                target.raw_max_ptr, target.raw_sum_ptr, stats_row(target, b, i) * target.num_blocks, target.num_blocks,
                tl.full([], 1.0, tl.float32), BLOCKS,
            )  # fmt: skip
            raw_log_p = raw - lse
        tl.store(log_probs_ptr + b * (step.num_drafts + 1) + i, log_p)
        tl.store(raw_log_probs_ptr + b * (step.num_drafts + 1) + i, raw_log_p)


@triton.jit
def emit(step, b, j, status, token, outputs, BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    """Stores what a sequence emits: its first ``j`` drafts, whose log-probabilities are stored already, then ``token``
    unless that is -1."""
    tokens_ptr, num_accepted_ptr, status_ptr, num_emitted_ptr, log_probs_ptr, raw_log_probs_ptr = outputs
    row, num_rows = tl.arange(0, ROWS), step.num_drafts + 1
    drafts = tl.load(step.target.sampling.drafts_ptr + b * step.num_drafts + row, mask=row < j, other=-1)
    emitted = tl.where(row == j, token, drafts)
    tl.store(tokens_ptr + b * num_rows + row, emitted, mask=row < num_rows)
    tl.store(num_accepted_ptr + b, j)
    tl.store(status_ptr + b, status)
    tl.store(num_emitted_ptr + b, j + tl.where(token >= 0, 1, 0))
    if log_probs_ptr is not None:
        after = (row > j) & (row < num_rows)
        tl.store(log_probs_ptr + b * num_rows + row, float("nan"), mask=after)
        tl.store(raw_log_probs_ptr + b * num_rows + row, float("nan"), mask=after)
    store_log_probs(step, b, j, token, outputs, BLOCKS)
