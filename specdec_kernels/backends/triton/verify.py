"""Verification of drafts: a step in memory, the q of a draft, and the residual max(0, w p - q)."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .core import BLOCK, DRAFT_OUT_OF_RANGE, INFINITY, LOG2E, inverse, log_probability, probability, residual, row_fault
from .random import RECOVER_TOKEN, race
from .rows import Rows, adjusted, find, load_limit, load_raw, load_row, load_tokens, masked, tokens_of


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
    """(the draft of row j, -1 if there is none; status flags); or those of several rows."""
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
        return lse, cutoff, row_fault(largest * inverse(tl.load(step.draft.sampling.temperature_ptr + b)))
    else:
        # draft_step returns NaN for a row that has no distribution.
        lse = tl.load(step.draft_lse_ptr + b * step.num_drafts + j)
        return lse, tl.load(step.draft_cutoff_ptr + b * step.num_drafts + j), row_fault(lse)


@triton.jit
def load_q_logits(step, b, j, ids):
    """Adjusted logits of target ids in row j of q, or of one id in each of several rows; -inf for ids that q lacks."""
    listed, place = (ids >= 0) & (ids < step.target.vocabulary), ids
    if step.draft.d2t_ptr is not None:
        place, listed = find(step.draft.d2t_ptr, step.draft.vocabulary, ids)
    x = masked(load_raw(step.draft, b, j, place, listed), ids, step.draft, b, j)
    return tl.where(listed, adjusted(x, ids, step.draft.sampling, b, j), -INFINITY)


@triton.jit
def log_q_of(step, b, j, ids, q_lse, q_cutoff):
    """log q of target ids (a scalar or a vector) in row j. A one-hot q has 0 at the draft, -inf elsewhere."""
    if step.draft.ptr is not None:
        inverse_temperature = inverse(tl.load(step.target.sampling.temperature_ptr + b))
        unfiltered: tl.constexpr = step.draft.cutoff_ptr is None and step.draft_cutoff_ptr is None
        its_cutoff = None if unfiltered else q_cutoff
        return log_probability(load_q_logits(step, b, j, ids), inverse_temperature, q_lse, its_cutoff)
    else:
        x, flags = load_draft(step, b, j)
        return tl.where(ids == x, 0.0, -INFINITY)


@triton.jit
def load_p_and_q(step, b, j, ids, drafted, p_lse, p_cutoff, q_lse, q_cutoff):
    """p and q of the tokens ``ids`` of row j; without reading it, q is 0 where the row is not ``drafted``."""
    p = load_tokens(step.target, b, j, ids)
    inverse_temperature = inverse(tl.load(step.target.sampling.temperature_ptr + b))
    p = probability(p, inverse_temperature, p_lse, None if step.target.cutoff_ptr is None else p_cutoff)
    log_q = log_q_of(step, b, j, tl.where(drafted, ids, -1), q_lse, q_cutoff)
    return p, tl.where(drafted, tl.exp2(log_q * LOG2E), 0.0)


@triton.jit
def draw_in_block(step, b, j, w, block, drafted, p_lse, p_cutoff, q_lse, q_cutoff):
    """Draws a token of a block of row j from max(0, w p - q), or from p if the row is not ``drafted``."""
    seed, position = tl.load(step.target.sampling.seed_ptr + b), tl.load(step.target.sampling.position_ptr + b)
    p, q = load_p_and_q(step, b, j, tokens_of(block), drafted, p_lse, p_cutoff, q_lse, q_cutoff)
    first = tl.cast(block, tl.int64) * BLOCK
    return first + race(residual(w, p, q), first, BLOCK, seed, position, j, RECOVER_TOKEN)
