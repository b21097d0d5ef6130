"""``draft_step``: ``measure``, with filters ``select`` (and with rule ``coupled`` ``race``), then ``decide`` without a
walk: one program for each sequence merges the statistics and draws, or picks the winner of the race."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import ops
from .core import (
    COUPLED_RULE,
    DRAFT_BLOCK,
    DRAFT_FLAG_FACTOR,
    DRAFT_TOKEN,
    INFINITY,
    inverse,
    log_probability,
    row_fault,
)
from .dependent import wait_for_earlier
from .draw import argmax, draw, race_winner
from .launch import (
    NOT_FILTERED,
    Filtered,
    contiguous,
    dense_rows,
    device_guard,
    number_of_blocks,
    padded_blocks,
    rows_on_device,
    sampling_on_device,
)
from .rows import NO_ROWS, load_row, load_token, target_ids
from .stages import find_statistics
from .tables import options


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
                token = draw(rows, b, j, BLOCKS, DRAFT_BLOCK, DRAFT_TOKEN)
            else:
                token = race_winner(rows, b, j, raced, block_max, largest, 0)
            logit, raw = load_token(rows, b, j, token)
            log_q = log_probability(logit, inverse(temperature), lse, cutoff)
        token = target_ids(rows, token)
    store_draft(outputs, b, token, log_q, cutoff, lse, fault)


def draft_step(logits, sampling, drafts, d2t, allowed, seed, position, offset, rule):
    sampling, (batch, vocabulary), device = ops.SamplingTensors(*sampling), logits.shape, logits.device
    logits, num_blocks = dense_rows(logits), number_of_blocks(vocabulary)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    tokens, status = empty(batch, dtype=torch.int64), empty(batch, dtype=torch.int32)
    outputs = (tokens, empty(batch), empty(batch), empty(batch), status)
    if batch > 0:
        filtered, coupled = sampling.filters is not None, rule == COUPLED_RULE.value
        drafts = seed.new_empty((batch, 0)) if drafts is None else drafts
        block_max, block_sum = empty(2, batch, num_blocks).unbind()
        rows = rows_on_device(
            logits, (logits.stride(0), 0), vocabulary, contiguous(d2t), sampling_on_device(sampling, seed, position,
            drafts), (1, 0), (block_max, block_sum), filtered=Filtered.empty(batch, num_blocks, device) if filtered else
            NOT_FILTERED, allowed=None if allowed is None else allowed[:, None].expand(-1, offset + 1, -1),
        )  # fmt: skip
        raced = (empty(batch, num_blocks), empty(batch, num_blocks, dtype=torch.int32)) if coupled else None
        with device_guard(logits):
            find_statistics(rows, NO_ROWS, None, batch, 1, offset, raced)
            decide_draft_kernel[(batch,)](
                rows, offset, raced, outputs, BLOCKS=padded_blocks(num_blocks),
                **options("decide_draft_kernel", device, sampling.table_ids is not None),
            )  # fmt: skip
    return outputs


ops.implement("draft_step_triton", draft_step)
