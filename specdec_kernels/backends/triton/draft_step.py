"""``draft_step``: ``measure``, with filters ``select`` (and with rule ``coupled`` ``race``), then ``decide`` without a
walk: one program for each sequence merges the statistics and draws, or picks the winner of the race."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import ops
from .core import (
    COUPLED_RULE,
    DRAFT_FLAG_FACTOR,
    INFINITY,
    inverse,
    log_probability,
    row_fault,
)
from .dependent import wait_for_earlier
from .draw import argmax, draw, race_winner
from .kinds import Scratch, kind_of
from .launch import (
    NO_MASKS,
    Given,
    contiguous,
    dense_rows,
    device_guard,
    masks_of,
    number_of_blocks,
    padded_blocks,
    pieces_of_statistics,
    pitch_of,
    rows_on_device,
)
from .rows import NO_ROWS, load_row, load_token, target_ids
from .stages import find_statistics


@triton.jit
def store_draft(outputs, b, token, log_q, cutoff, lse, fault):
    tokens_ptr, log_q_ptr, cutoff_ptr, lse_ptr, status_ptr = outputs
    tl.store(tokens_ptr + b, token)
    tl.store(log_q_ptr + b, log_q)
    tl.store(cutoff_ptr + b, cutoff)
    tl.store(lse_ptr + b, tl.where(fault == 0, lse, float("nan")))
    tl.store(status_ptr + b, fault * DRAFT_FLAG_FACTOR)


@triton.jit(do_not_specialize=["offset"])
def decide_draft_kernel(
    rows,  # Rows [B, 1, V]
    offset,
    raced,  # (scores, winners) of rule `coupled`, [B, blocks] each; else None
    outputs,  # tokens, log_q, cutoff, lse, status: [B] each
    BLOCKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    j = b * 0 + offset
    temperature = tl.load(rows.sampling.temperature_ptr + b)
    wait_for_earlier(DEPENDENT)
    largest, lse, cutoff, mass, block_max = load_row(rows, b, j, BLOCKS)
    fault = row_fault(largest)
    token = tl.full([], -1, tl.int64)
    log_q = tl.full([], -INFINITY, tl.float32)
    if fault == 0:
        if temperature == 0.0:
            token = argmax(rows, b, j, block_max, largest, BLOCKS)
            log_q = tl.full([], 0.0, tl.float32)
        else:
            if raced is None:
                token = draw(rows, b, j, BLOCKS)
            else:
                token = race_winner(rows, b, j, raced, block_max, largest, 0)
            logit, raw = load_token(rows, b, j, token)
            log_q = log_probability(logit, inverse(temperature), lse, cutoff)
        token = target_ids(rows, token)
    store_draft(outputs, b, token, log_q, cutoff, lse, fault)


def scratch_of(batch: int, num_blocks: int, filtered: bool, coupled: bool) -> Scratch:
    """In this order: statistics; races."""
    statistics, blocks = pieces_of_statistics(batch, num_blocks, filtered), (batch, pitch_of(num_blocks))
    return Scratch(*statistics, *((torch.float32, blocks), (torch.int32, blocks)) if coupled else (None, None))


def draft_step(logits, sampling, drafts, d2t, allowed, seed, position, offset, rule):
    sampling, (batch, vocabulary), device = ops.SamplingTensors(*sampling), logits.shape, logits.device

    def empty(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(batch, dtype=dtype, device=device)

    results = (
        empty(torch.int64), empty(torch.float32), empty(torch.float32), empty(torch.float32), empty(torch.int32)
    )  # fmt: skip
    if batch == 0:
        return results
    logits, num_blocks = dense_rows(logits), number_of_blocks(vocabulary)
    allowed = None if allowed is None else dense_rows(allowed)
    drafts = seed.new_empty((batch, 0)) if drafts is None else drafts
    given = Given(sampling, seed, position, drafts, None, (logits, contiguous(d2t), allowed), results)
    strides = logits.stride()
    form = "draft_step", rule, offset, given.forms, strides, None if allowed is None else allowed.stride()
    filtered, coupled = sampling.filters is not None, rule == COUPLED_RULE.value
    kind = kind_of(form, device, lambda: scratch_of(batch, num_blocks, filtered, coupled))
    memory, scratch = kind.allocate()
    on_device, (pointer, ids, bits, *outputs) = given.pointers(kind)
    masks = NO_MASKS if allowed is None else masks_of(bits, allowed, 0, offset + 1)
    rows = rows_on_device(
        pointer, (strides[0], 0), vocabulary, num_blocks, ids, on_device, (1, 0), scratch[:5], masks=masks
    )
    raced = tuple(scratch[5:]) if coupled else None
    with device_guard(logits):
        find_statistics(kind, rows, NO_ROWS, None, batch, 1, offset, raced)
        kind.launch(
            decide_draft_kernel, (batch, 1, 1), rows, offset, raced, tuple(outputs), BLOCKS=padded_blocks(num_blocks),
            table=sampling.table_ids is not None,
        )  # fmt: skip
    kind.ended(memory)
    return results


ops.implement("draft_step_triton", draft_step)
