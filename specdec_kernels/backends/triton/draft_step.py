"""``draft_step`` in two launches, or in three with filters.

1. Statistics of every block of logits.
2. With filters: one program per sequence finds its cutoff.
3. One program per sequence merges the statistics and draws. With rule ``coupled``, one program per block runs its part
   of the race, and the last program of a sequence picks the winner.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import ops
from .arrivals import arrives_last
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
from .draw import argmax, draw, race_block, race_winner
from .filters import filter_kernel
from .launch import (
    contiguous,
    dense_rows,
    device_guard,
    number_of_blocks,
    padded_blocks,
    rows_on_device,
    sampling_on_device,
)
from .rows import NO_ROWS, load_row, load_token, stats_kernel, target_ids
from .tables import options


@triton.jit
def store_draft(outputs, b, token, log_q, cutoff, lse, fault):
    tokens_ptr, log_q_ptr, cutoff_ptr, lse_ptr, status_ptr = outputs
    tl.store(tokens_ptr + b, token)
    tl.store(log_q_ptr + b, log_q)
    tl.store(cutoff_ptr + b, cutoff)
    tl.store(lse_ptr + b, tl.where(fault == 0, lse, float("nan")))
    tl.store(status_ptr + b, fault * DRAFT_FLAG_FACTOR)


@triton.jit
def draw_draft(rows, b, j, score_ptr, winner_ptr, outputs, BLOCKS: tl.constexpr):
    """Draws a sequence's draft in two levels, or picks the winner of the race whose parts are at ``score_ptr``."""
    temperature = tl.load(rows.sampling.temperature_ptr + b)
    largest, lse, cutoff, mass, block_max = load_row(rows, b, j, BLOCKS)
    fault = row_fault(largest)
    token = tl.full([], -1, tl.int64)
    log_q = tl.full([], -INFINITY, tl.float32)
    if fault == 0:
        if temperature == 0.0:
            token = argmax(rows, b, j, block_max, largest, BLOCKS)
            log_q = tl.full([], 0.0, tl.float32)
        else:
            if score_ptr is None:
                token = draw(rows, b, j, BLOCKS, DRAFT_BLOCK, DRAFT_TOKEN)
            else:
                token = race_winner(rows, b, j, score_ptr, winner_ptr, block_max, largest, BLOCKS)
            logit, raw = load_token(rows, b, j, token)
            log_q = log_probability(logit, inverse(temperature), lse, cutoff)
        token = target_ids(rows, token)
    store_draft(outputs, b, token, log_q, cutoff, lse, fault)


@triton.jit(do_not_specialize=["offset"])
def draft_draw_kernel(
    rows,  # Rows [B, 1, V]
    offset,
    outputs,  # tokens, log_q, cutoff, lse, status: [B] each
    BLOCKS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    draw_draft(rows, b, b * 0 + offset, None, None, outputs, BLOCKS)


@triton.jit(do_not_specialize=["offset"])
def draft_race_kernel(
    rows,  # Rows [B, 1, V]
    offset,
    score_ptr,  # [B, blocks] scratch
    winner_ptr,
    arrivals_ptr,  # [B], 0
    outputs,  # tokens, log_q, cutoff, lse, status: [B] each
    BLOCKS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    b, block = at // rows.num_blocks, at % rows.num_blocks
    j = b * 0 + offset
    if tl.load(rows.sampling.temperature_ptr + b) != 0.0:
        race_block(rows, b, j, block, score_ptr, winner_ptr)
    if arrives_last(arrivals_ptr, b, rows.num_blocks):
        draw_draft(rows, b, j, score_ptr, winner_ptr, outputs, BLOCKS)


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
            drafts), (1, 0), (block_max, block_sum), cutoff=empty(batch) if filtered else None,
            allowed=None if allowed is None else allowed[:, None].expand(-1, offset + 1, -1),
        )  # fmt: skip
        arrivals = empty(batch, dtype=torch.int32) if coupled else None
        blocks, table = padded_blocks(num_blocks), sampling.table_ids is not None
        with device_guard(logits):
            stats_kernel[(batch * num_blocks,)](
                rows, NO_ROWS, None, batch, 1, offset, arrivals, **options("stats_kernel", device, table)
            )
            if filtered:
                filter_kernel[(batch,)](
                    rows, NO_ROWS, None, batch, 1, offset, BLOCKS=blocks, **options("filter_kernel", device, table)
                )
            if coupled:
                scores, winners = empty(batch, num_blocks), empty(batch, num_blocks, dtype=torch.int64)
                draft_race_kernel[(batch * num_blocks,)](
                    rows, offset, scores, winners, arrivals, outputs, BLOCKS=blocks,
                    **options("draft_race_kernel", device, table),
                )  # fmt: skip
            else:
                draft_draw_kernel[(batch,)](
                    rows, offset, outputs, BLOCKS=blocks, **options("draft_draw_kernel", device, table)
                )
    return outputs


ops.implement("draft_step_triton", draft_step)
