"""``draft_step`` in two launches: statistics of all blocks, then one program a sequence merges, races and draws."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...ops import implement
from .core import (
    BLOCK,
    DRAFT_BLOCK,
    DRAFT_FLAG_FACTOR,
    DRAFT_TOKEN,
    INFINITY,
    argmax,
    draw,
    inverse,
    load_row,
    log_probability,
    row_fault,
    store_block_stats,
)
from .launch import dense_rows, device_guard, padded_blocks


@triton.jit
def draft_stats_kernel(
    logits_ptr,  # [B, V], rows dense
    row_stride,
    vocabulary,
    num_blocks,
    temperature_ptr,  # [B]
    max_ptr,  # [B, blocks] out
    sum_ptr,  # [B, blocks] out
):
    at = tl.program_id(0).to(tl.int64)
    b, block = at // num_blocks, at % num_blocks
    store_block_stats(
        logits_ptr + b * row_stride, block, vocabulary, tl.load(temperature_ptr + b), max_ptr, sum_ptr, at
    )


@triton.jit(do_not_specialize=["offset"])
def draft_draw_kernel(
    logits_ptr,  # [B, V], rows dense
    row_stride,
    vocabulary,
    num_blocks,
    temperature_ptr,  # [B]
    seed_ptr,  # [B]
    position_ptr,  # [B]
    offset,
    max_ptr,  # [B, blocks]
    sum_ptr,  # [B, blocks]
    tokens_ptr,  # [B] out, as the rest
    log_q_ptr,
    cutoff_ptr,
    lse_ptr,
    status_ptr,
    BLOCKS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + b * row_stride
    temperature = tl.load(temperature_ptr + b)
    largest, lse, mass, block_max = load_row(max_ptr, sum_ptr, b, num_blocks, temperature, BLOCKS)
    fault = row_fault(largest)
    token = tl.full([], -1, tl.int64)
    log_q = tl.full([], -INFINITY, tl.float32)
    if fault == 0:
        if temperature == 0.0:
            token = argmax(row_ptr, vocabulary, block_max, largest, BLOCKS)
            log_q = tl.full([], 0.0, tl.float32)
        else:
            seed, position = tl.load(seed_ptr + b), tl.load(position_ptr + b)
            token = draw(
                row_ptr, vocabulary, mass, block_max, largest, temperature, -1, seed, position, offset, BLOCKS,
                DRAFT_BLOCK, DRAFT_TOKEN,
            )  # fmt: skip
            logit = tl.load(row_ptr + token).to(tl.float32)
            log_q = log_probability(logit, inverse(temperature), lse)
    tl.store(tokens_ptr + b, token)
    tl.store(log_q_ptr + b, log_q)
    tl.store(cutoff_ptr + b, -INFINITY)
    tl.store(lse_ptr + b, tl.where(fault == 0, lse, float("nan")))
    tl.store(status_ptr + b, fault * DRAFT_FLAG_FACTOR)


def draft_step(logits, temperature, seed, position, offset: int):
    (batch, vocabulary), device = logits.shape, logits.device
    logits, temperature = dense_rows(logits), temperature.contiguous()
    num_blocks = triton.cdiv(vocabulary, BLOCK.value)
    block_max, block_sum = torch.empty((2, batch, num_blocks), dtype=torch.float32, device=device).unbind()
    tokens = torch.empty(batch, dtype=torch.int64, device=device)
    log_q, cutoff, lse = (torch.empty(batch, dtype=torch.float32, device=device) for _ in range(3))
    status = torch.empty(batch, dtype=torch.int32, device=device)
    if batch > 0:
        row = (logits, logits.stride(0), vocabulary, num_blocks, temperature)
        with device_guard(logits):
            draft_stats_kernel[(batch * num_blocks,)](*row, block_max, block_sum)
            draft_draw_kernel[(batch,)](
                *row, seed.contiguous(), position.contiguous(), offset, block_max, block_sum,
                tokens, log_q, cutoff, lse, status, BLOCKS=padded_blocks(num_blocks),
            )  # fmt: skip
    return tokens, log_q, cutoff, lse, status


implement("draft_step_triton", draft_step)
