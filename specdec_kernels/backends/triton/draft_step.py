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
from .kinds import FirstCall
from .launch import (
    Given,
    arguments_of,
    launch,
    masks_of,
    number_of_blocks,
    padded_blocks,
    races_of,
    rows_on_device,
    statistics_of,
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
    fault = row_fault(largest * inverse(temperature))
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


def draft_step(logits, sampling, drafts, d2t, allowed, seed, position, offset, rule):
    batch, device = logits.shape[0], logits.device
    tokens, status = (torch.empty(batch, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32))
    log_q = torch.empty(batch, dtype=torch.float32, device=device)
    results = tokens, log_q, torch.empty_like(log_q), torch.empty_like(log_q), status
    if batch == 0:
        return results
    sampling = ops.SamplingTensors(*sampling)
    given = Given(sampling, seed, position, drafts, None, (d2t,), (logits, allowed), results)
    launch(("draft_step", rule, offset), given, lambda call: first_draft(call, rule, offset))
    return results


def first_draft(call: FirstCall, rule: int, offset: int) -> None:
    sampling, (ids, logits, allowed, *outputs) = arguments_of(call)
    batch, vocabulary = logits.shape
    num_blocks = number_of_blocks(vocabulary)
    rows = rows_on_device(
        logits, (logits.stride(0), 0), vocabulary, num_blocks, ids, sampling, (1, 0),
        statistics_of(call, batch, num_blocks, sampling), masks=masks_of(allowed, offset + 1),
    )  # fmt: skip
    raced = races_of(call, batch, num_blocks) if rule == COUPLED_RULE.value else None
    find_statistics(call, rows, NO_ROWS, None, batch, 1, offset, raced)
    call.launch(
        decide_draft_kernel, (batch, 1, 1), rows, offset, raced, tuple(outputs), BLOCKS=padded_blocks(num_blocks),
        table=sampling.ids_ptr is not None,
    )  # fmt: skip


ops.implement("draft_step_triton", draft_step)
