"""``draft_step`` in two launches, or in three with filters or a compact q.

1. Statistics of every block of logits.
2. With filters or a compact q: one program per sequence finds its cutoff.
3. One program per sequence merges the statistics and draws. With rule ``coupled``, one program per block runs its part
   of the race, and the last program of a sequence picks the winner.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import ops
from ...types import TABLE_PADDING
from .arrivals import arrives_last
from .core import (
    BLOCK,
    COUPLED_RULE,
    DRAFT_BLOCK,
    DRAFT_FLAG_FACTOR,
    DRAFT_TOKEN,
    INFINITY,
    inverse,
    log_probability,
    ordered_key,
    race,
    row_fault,
    weight,
)
from .draw import argmax, draw, race_block, race_winner
from .filters import filter_kernel, weigh
from .launch import (
    contiguous,
    dense_rows,
    device_guard,
    number_of_blocks,
    padded_blocks,
    rows_on_device,
    sampling_on_device,
)
from .rows import NO_ROWS, load_block, load_row, load_token, stats_kernel, target_ids
from .tables import options

PADDING = tl.constexpr(TABLE_PADDING)


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


@triton.jit
def store_listed(rows, b, j, cutoff, block_max_ptr, size, ids_ptr, logits_ptr):
    """Stores the indices and logits of the ``size`` largest logits in ascending order of indices. ``cutoff`` is the
    smallest of them; of its ties, those with the lowest ids are listed. Returns how many were listed."""
    key = ordered_key(cutoff)
    larger, above, below = weigh(rows, b, j, key, key + 1, cutoff, cutoff, True)
    num_listed, ties = tl.full([], 0, tl.int32), size - larger.to(tl.int32)
    for block in range(0, rows.num_blocks):
        if tl.load(block_max_ptr + block) >= cutoff:
            x = load_block(rows, b, j, block)
            tie = (x == cutoff).to(tl.int32)
            listed = (x > cutoff) | ((tie != 0) & (tl.cumsum(tie, 0) <= ties))
            slot = num_listed + tl.cumsum(listed.to(tl.int32), 0) - 1
            tl.store(ids_ptr + slot, tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK), mask=listed)
            tl.store(logits_ptr + slot, x, mask=listed)
            num_listed += tl.sum(listed.to(tl.int32), 0)
            ties -= tl.sum(tie, 0)
    return num_listed


@triton.jit(do_not_specialize=["offset"])
def compact_draw_kernel(
    rows,  # Rows [B, 1, V]
    offset,
    size,  # k'
    ids_ptr,  # [B, k'] out
    compact_log_q_ptr,  # [B, k'] out
    outputs,  # tokens, log_q, cutoff, lse, status: [B] each
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,  # k' or more, a power of 2
):
    b = tl.program_id(0).to(tl.int64)
    j = b * 0 + offset
    slots = tl.arange(0, SLOTS)
    temperature = tl.load(rows.sampling.temperature_ptr + b)
    largest, lse, cutoff, mass, block_max = load_row(rows, b, j, BLOCKS)
    fault = row_fault(largest)
    drawn = tl.full([], -1, tl.int32)
    num_listed = tl.full([], 0, tl.int32)
    index = tl.zeros([SLOTS], tl.int64)
    log_q = tl.full([SLOTS], -INFINITY, tl.float32)
    if fault == 0:
        if temperature == 0.0:
            drawn, num_listed = tl.full([], 0, tl.int32), tl.full([], 1, tl.int32)
            index += argmax(rows, b, j, block_max, largest, BLOCKS)
            log_q = tl.zeros([SLOTS], tl.float32)
        else:
            block_max_ptr = rows.max_ptr + b * rows.num_blocks
            num_listed = store_listed(
                rows, b, j, cutoff, block_max_ptr, size, ids_ptr + b * size, compact_log_q_ptr + b * size
            )
            tl.debug_barrier()  # threads read below what other threads stored, and then overwrite it
            index = tl.load(ids_ptr + b * size + slots, mask=slots < num_listed, other=0)
            x = tl.load(compact_log_q_ptr + b * size + slots, mask=slots < num_listed, other=-INFINITY)
            tl.debug_barrier()
            w = weight(x, largest, inverse(temperature))
            lse = largest * inverse(temperature) + tl.log(tl.sum(w, 0))
            log_q = log_probability(x, inverse(temperature), lse, cutoff)
            seed, position = tl.load(rows.sampling.seed_ptr + b), tl.load(rows.sampling.position_ptr + b)
            drawn = race(w, 0, SLOTS, seed, position, j, DRAFT_TOKEN)
    ids = tl.where(slots < num_listed, target_ids(rows, index), PADDING)
    log_q = tl.where(slots < num_listed, log_q, -INFINITY)
    tl.store(ids_ptr + b * size + slots, ids, mask=slots < size)
    tl.store(compact_log_q_ptr + b * size + slots, log_q, mask=slots < size)
    token = tl.where(fault == 0, tl.sum(tl.where(slots == drawn, ids, 0), 0), -1)
    log_q = tl.where(fault == 0, tl.sum(tl.where(slots == drawn, log_q, 0.0), 0), -INFINITY)
    store_draft(outputs, b, token, log_q, cutoff, lse, fault)


def draft_step(logits, *rest):
    *tensors, drafts, d2t, seed, position, offset, rule, compact = rest
    sampling, (batch, vocabulary), device = ops.SamplingTensors(*tensors), logits.shape, logits.device
    logits, num_blocks = dense_rows(logits), number_of_blocks(vocabulary)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    tokens, status = empty(batch, dtype=torch.int64), empty(batch, dtype=torch.int32)
    outputs = (tokens, empty(batch), empty(batch), empty(batch), status)
    compact_ids, compact_log_q = empty(batch, compact, dtype=torch.int64), empty(batch, compact)
    if batch > 0:
        filtered, coupled = sampling.filters is not None or compact > 0, rule == COUPLED_RULE.value
        drafts = seed.new_empty((batch, 0)) if drafts is None else drafts
        block_max, block_sum = empty(2, batch, num_blocks).unbind()
        rows = rows_on_device(
            logits, (logits.stride(0), 0), vocabulary, contiguous(d2t), sampling_on_device(sampling, seed, position,
            drafts), (1, 0), (block_max, block_sum), cutoff=empty(batch) if filtered else None,
        )  # fmt: skip
        arrivals = empty(batch, dtype=torch.int32) if coupled else None
        blocks, table = padded_blocks(num_blocks), sampling.table_ids is not None
        with device_guard(logits):
            stats_kernel[(batch * num_blocks,)](
                rows, NO_ROWS, None, batch, 1, offset, arrivals, **options("stats_kernel", device, table)
            )
            if filtered:
                filter_kernel[(batch,)](
                    rows, NO_ROWS, None, batch, 1, offset, compact, BLOCKS=blocks,
                    **options("filter_kernel", device, table),
                )  # fmt: skip
            if compact:
                compact_draw_kernel[(batch,)](
                    rows, offset, compact, compact_ids, compact_log_q, outputs, BLOCKS=blocks,
                    SLOTS=padded_blocks(compact), **options("compact_draw_kernel", device, table),
                )  # fmt: skip
            elif coupled:
                scores, winners = empty(batch, num_blocks), empty(batch, num_blocks, dtype=torch.int64)
                draft_race_kernel[(batch * num_blocks,)](
                    rows, offset, scores, winners, arrivals, outputs, BLOCKS=blocks,
                    **options("draft_race_kernel", device, table),
                )  # fmt: skip
            else:
                draft_draw_kernel[(batch,)](
                    rows, offset, outputs, BLOCKS=blocks, **options("draft_draw_kernel", device, table)
                )
    return *outputs, compact_ids, compact_log_q


ops.implement("draft_step_triton", draft_step)
