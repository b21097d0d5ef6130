"""``speculative_step`` in three launches.

1. Statistics of every block of every row that may be needed.
2. A program for each (sequence, block) walks over the drafts, and weighs its block of max(0, p - q) where the walk
   ended with a rejection. All programs of a sequence walk alike; the first one writes down where the walk stands.
3. A program for each sequence draws. Where the residual turns out to have no mass, the draft stands and it walks on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...ops import implement
from .core import (
    ACCEPT,
    BLOCK,
    DRAFT_FLAG_FACTOR,
    DRAFT_OUT_OF_RANGE,
    DRAFT_ZERO_PROBABILITY,
    INFINITY,
    RECOVER_BLOCK,
    RECOVER_TOKEN,
    accept,
    argmax,
    draw,
    inverse,
    load_row,
    log_probability,
    probability,
    race,
    random_bits,
    residual_weights,
    row_fault,
    store_block_stats,
    uniform,
)
from .launch import dense_rows, device_guard, padded_blocks

# Where a walk stands.
DONE = tl.constexpr(0)  # the sequence is decided
WALKING = tl.constexpr(1)  # this row is next
DRAW = tl.constexpr(2)  # a token of this row is to be drawn from p
DRAW_WITHOUT = tl.constexpr(3)  # from p with the draft taken out: the residual of a one-hot draft
RECOVER = tl.constexpr(4)  # from max(0, p - q)


@triton.jit
def load_limit(num_drafts_ptr, b, num_drafts):
    """How many of a sequence's drafts count."""
    if num_drafts_ptr is None:
        return num_drafts
    else:
        return tl.minimum(tl.load(num_drafts_ptr + b), num_drafts).to(tl.int32)


@triton.jit
def row_stats_kernel(
    target_ptr,  # [B, K+1, V], rows dense
    target_stride_b,
    target_stride_j,
    draft_ptr,  # [B, K, V], rows dense; None: the target's rows alone
    draft_stride_b,
    draft_stride_j,
    num_drafts_ptr,  # [B] or None
    temperature_ptr,  # [B]
    batch,
    num_drafts,  # K
    vocabulary,
    num_blocks,
    max_ptr,  # [B (K+1), blocks], then [B K, blocks] of the draft, out
    sum_ptr,
):
    at = tl.program_id(0).to(tl.int64)
    row, block = at // num_blocks, at % num_blocks
    target_rows = batch * (num_drafts + 1)
    if row < target_rows:
        b, j = row // (num_drafts + 1), row % (num_drafts + 1)
        temperature = tl.load(temperature_ptr + b)
        if j <= load_limit(num_drafts_ptr, b, num_drafts):
            row_ptr = target_ptr + b * target_stride_b + j * target_stride_j
            store_block_stats(row_ptr, block, vocabulary, temperature, max_ptr, sum_ptr, at)
    elif draft_ptr is not None:
        b, j = (row - target_rows) // num_drafts, (row - target_rows) % num_drafts
        temperature = tl.load(temperature_ptr + b)
        # Greedy sequences take drafts for one-hot, whatever their logits.
        if (j < load_limit(num_drafts_ptr, b, num_drafts)) & (temperature != 0.0):
            row_ptr = draft_ptr + b * draft_stride_b + j * draft_stride_j
            store_block_stats(row_ptr, block, vocabulary, temperature, max_ptr, sum_ptr, at)


@triton.jit
def walk(
    j,
    b,
    status,
    target_ptr,
    target_stride_b,
    target_stride_j,
    draft_ptr,
    draft_stride_b,
    draft_stride_j,
    draft_tokens_ptr,
    draft_lse_ptr,
    num_drafts_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    batch,
    num_drafts,
    vocabulary,
    num_blocks,
    max_ptr,
    sum_ptr,
    BLOCKS: tl.constexpr,
):
    """Walks from row ``j`` (int64: rows lie more than 2^31 elements apart) until no draft is kept.

    Returns (row, where the walk stands, status, token if it is decided, lse of p, lse of q)."""
    limit = load_limit(num_drafts_ptr, b, num_drafts)
    temperature = tl.load(temperature_ptr + b)
    state = tl.full([], WALKING, tl.int32)
    token = tl.full([], -1, tl.int64)
    p_lse, q_lse = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    while state == WALKING:
        row_ptr = target_ptr + b * target_stride_b + j * target_stride_j
        largest, p_lse, mass, block_max = load_row(
            max_ptr, sum_ptr, b * (num_drafts + 1) + j, num_blocks, temperature, BLOCKS
        )
        fault = row_fault(largest)
        status = status | fault
        x = tl.load(draft_tokens_ptr + b * num_drafts + j, mask=j < limit, other=-1)
        in_range = (x >= 0) & (x < vocabulary)
        if (fault == 0) & (x != -1) & (in_range == 0):
            status = status | DRAFT_OUT_OF_RANGE
        x = tl.where(in_range, x, -1)
        if fault != 0:
            state = tl.full([], DONE, tl.int32)
        elif temperature == 0.0:
            best = argmax(row_ptr, vocabulary, block_max, largest, BLOCKS)
            token = tl.where(x == best, token, best)
            state = tl.where(x == best, WALKING, DONE).to(tl.int32)
        elif x < 0:
            state = tl.full([], DRAW, tl.int32)
        else:
            log_q = tl.full([], 0.0, tl.float32)  # one-hot
            draft_fault = tl.full([], 0, tl.int32)
            if draft_ptr is not None:
                if draft_lse_ptr is not None:
                    # A NaN is how draft_step hands over the statistics of a row without a distribution.
                    q_lse = tl.load(draft_lse_ptr + b * num_drafts + j)
                    draft_fault = row_fault(q_lse)
                else:
                    at = batch * (num_drafts + 1) + b * num_drafts + j
                    q_largest, q_lse, q_mass, q_max = load_row(max_ptr, sum_ptr, at, num_blocks, temperature, BLOCKS)
                    draft_fault = row_fault(q_largest)
                logit = tl.load(draft_ptr + b * draft_stride_b + j * draft_stride_j + x).to(tl.float32)
                log_q = log_probability(logit, inverse(temperature), q_lse)
            logit = tl.load(row_ptr + x).to(tl.float32)
            log_p = log_probability(logit, inverse(temperature), p_lse)
            seed, position = tl.load(seed_ptr + b), tl.load(position_ptr + b)
            # One word is used, of the first call: the sum picks it out of the vector.
            bits = random_bits(0, 4, seed, position, j, ACCEPT)
            u = tl.sum(tl.where(tl.arange(0, 4) == 0, uniform(bits), 0.0), 0)
            if draft_fault != 0:
                status = status | (draft_fault * DRAFT_FLAG_FACTOR)
                state = tl.full([], DRAW, tl.int32)
            elif log_q == -INFINITY:
                status = status | DRAFT_ZERO_PROBABILITY
                state = tl.full([], RECOVER, tl.int32)
            elif accept(u, log_p, log_q):
                state = tl.full([], WALKING, tl.int32)
            elif draft_ptr is None:
                state = tl.full([], DRAW_WITHOUT, tl.int32)
            else:
                state = tl.full([], RECOVER, tl.int32)
        if state == WALKING:
            j += 1
    return j, state, status, token, p_lse, q_lse


@triton.jit
def residual_kernel(
    target_ptr,
    target_stride_b,
    target_stride_j,
    draft_ptr,
    draft_stride_b,
    draft_stride_j,
    draft_tokens_ptr,  # [B, K]
    draft_lse_ptr,  # [B, K] or None: computed by the first launch
    num_drafts_ptr,
    temperature_ptr,
    seed_ptr,  # [B]
    position_ptr,  # [B]
    batch,
    num_drafts,
    vocabulary,
    num_blocks,
    max_ptr,
    sum_ptr,
    walk_ptr,  # [B, 4] out: row, where the walk stands, status, token
    lse_ptr,  # [B, 2] out: lse of p and of q
    mass_ptr,  # [B, blocks] out: mass of max(0, p - q), where the walk stands at RECOVER
    BLOCKS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    b, block = at // num_blocks, at % num_blocks
    temperature = tl.load(temperature_ptr + b)
    if block > 0:
        if draft_ptr is None:
            return
        if temperature == 0.0:
            return
    j, state, status, token, p_lse, q_lse = walk(
        tl.full([], 0, tl.int64), b, tl.full([], 0, tl.int32),
        target_ptr, target_stride_b, target_stride_j, draft_ptr, draft_stride_b, draft_stride_j, draft_tokens_ptr,
        draft_lse_ptr, num_drafts_ptr, temperature_ptr, seed_ptr, position_ptr, batch, num_drafts, vocabulary,
        num_blocks, max_ptr, sum_ptr, BLOCKS,
    )  # fmt: skip
    if block == 0:
        tl.store(walk_ptr + b * 4, j)
        tl.store(walk_ptr + b * 4 + 1, state.to(tl.int64))
        tl.store(walk_ptr + b * 4 + 2, status.to(tl.int64))
        tl.store(walk_ptr + b * 4 + 3, token)
        tl.store(lse_ptr + b * 2, p_lse)
        tl.store(lse_ptr + b * 2 + 1, q_lse)
    if draft_ptr is not None:
        if state == RECOVER:
            p_ptr = target_ptr + b * target_stride_b + j * target_stride_j
            q_ptr = draft_ptr + b * draft_stride_b + j * draft_stride_j
            w = residual_weights(p_ptr, p_lse, q_ptr, q_lse, block, vocabulary, temperature)
            tl.store(mass_ptr + at, tl.sum(w, 0))


@triton.jit
def draw_kernel(
    target_ptr,
    target_stride_b,
    target_stride_j,
    draft_ptr,
    draft_stride_b,
    draft_stride_j,
    draft_tokens_ptr,
    draft_lse_ptr,
    num_drafts_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    batch,
    num_drafts,
    vocabulary,
    num_blocks,
    max_ptr,
    sum_ptr,
    walk_ptr,
    lse_ptr,
    mass_ptr,
    tokens_ptr,  # [B, K+1] out
    num_accepted_ptr,  # [B] out
    status_ptr,  # [B] out
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,  # K + 1 or more, a power of 2
):
    b = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    temperature, seed, position = tl.load(temperature_ptr + b), tl.load(seed_ptr + b), tl.load(position_ptr + b)
    j, state = tl.load(walk_ptr + b * 4), tl.load(walk_ptr + b * 4 + 1).to(tl.int32)
    status, token = tl.load(walk_ptr + b * 4 + 2).to(tl.int32), tl.load(walk_ptr + b * 4 + 3)
    p_lse, q_lse = tl.load(lse_ptr + b * 2), tl.load(lse_ptr + b * 2 + 1)
    residual_mass = tl.load(mass_ptr + b * num_blocks + blocks, mask=blocks < num_blocks, other=0.0)
    while state != DONE:
        p_ptr = target_ptr + b * target_stride_b + j * target_stride_j
        x = tl.load(draft_tokens_ptr + b * num_drafts + j, mask=j < num_drafts, other=-1)
        kept = False
        if draft_ptr is not None:
            if state == RECOVER:
                q_ptr = draft_ptr + b * draft_stride_b + j * draft_stride_j
                block = race(residual_mass, 0, BLOCKS, seed, position, j, RECOVER_BLOCK)
                if block >= 0:
                    w = residual_weights(p_ptr, p_lse, q_ptr, q_lse, block, vocabulary, temperature)
                    first = block.to(tl.int64) * BLOCK
                    token = first + race(w, first, BLOCK, seed, position, j, RECOVER_TOKEN)
                    state = tl.full([], DONE, tl.int32)
                else:
                    # No mass: p and q are equal up to rounding, so the draft stands, unless p never yields it.
                    p_x = probability(tl.load(p_ptr + x).to(tl.float32), inverse(temperature), p_lse)
                    kept = p_x > 0.0
                    state = tl.full([], DRAW, tl.int32)
        if (state == DRAW) | (state == DRAW_WITHOUT):
            if kept == 0:
                without = tl.where(state == DRAW_WITHOUT, x, -1)
                largest, lse, mass, block_max = load_row(
                    max_ptr, sum_ptr, b * (num_drafts + 1) + j, num_blocks, temperature, BLOCKS
                )
                token = draw(
                    p_ptr, vocabulary, mass, block_max, largest, temperature, without, seed, position, j, BLOCKS,
                    RECOVER_BLOCK, RECOVER_TOKEN,
                )  # fmt: skip
                kept = token < 0  # p has no mass but on the draft
                state = tl.full([], DONE, tl.int32)
        if kept:
            j, state, status, token, p_lse, q_lse = walk(
                j + 1, b, status,
                target_ptr, target_stride_b, target_stride_j, draft_ptr, draft_stride_b, draft_stride_j,
                draft_tokens_ptr, draft_lse_ptr, num_drafts_ptr, temperature_ptr, seed_ptr, position_ptr, batch,
                num_drafts, vocabulary, num_blocks, max_ptr, sum_ptr, BLOCKS,
            )  # fmt: skip
            if draft_ptr is not None:
                if state == RECOVER:
                    p_ptr = target_ptr + b * target_stride_b + j * target_stride_j
                    q_ptr = draft_ptr + b * draft_stride_b + j * draft_stride_j
                    for i in range(num_blocks):
                        w = residual_weights(p_ptr, p_lse, q_ptr, q_lse, i, vocabulary, temperature)
                        residual_mass = tl.where(blocks == i, tl.sum(w, 0), residual_mass)
    row = tl.arange(0, ROWS)
    drafts = tl.load(draft_tokens_ptr + b * num_drafts + row, mask=row < j, other=-1)
    emitted = tl.where(row == j, token, drafts)
    tl.store(tokens_ptr + b * (num_drafts + 1) + row, emitted, mask=row <= num_drafts)
    tl.store(num_accepted_ptr + b, j)
    tl.store(status_ptr + b, status)


def speculative_step(target_logits, draft_tokens, draft_logits, draft_lse, num_drafts, temperature, seed, position):
    (batch, rows, vocabulary), device = target_logits.shape, target_logits.device
    target = dense_rows(target_logits)
    draft = None if draft_logits is None else dense_rows(draft_logits)
    draft_strides = (0, 0) if draft is None else draft.stride()[:2]
    limits = None if num_drafts is None else num_drafts.contiguous()
    temperature = temperature.contiguous()
    num_blocks = triton.cdiv(vocabulary, BLOCK.value)
    weigh_draft = draft is not None and draft_lse is None
    num_rows = batch * (rows + rows - 1 if weigh_draft else rows)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    block_max, block_sum = scratch(2, num_rows, num_blocks).unbind()
    tokens = scratch(batch, rows, dtype=torch.int64)
    num_accepted, status = (scratch(batch, dtype=torch.int32) for _ in range(2))
    if batch > 0:
        logits = (target, *target.stride()[:2], draft, *draft_strides)
        sizes = (batch, rows - 1, vocabulary, num_blocks)
        step = (
            *logits, draft_tokens.contiguous(), None if draft_lse is None else draft_lse.contiguous(), limits,
            temperature, seed.contiguous(), position.contiguous(), *sizes, block_max, block_sum,
            scratch(batch, 4, dtype=torch.int64), scratch(batch, 2), scratch(batch, num_blocks),
        )  # fmt: skip
        blocks = padded_blocks(num_blocks)
        with device_guard(target):
            row_stats_kernel[(num_rows * num_blocks,)](*logits, limits, temperature, *sizes, block_max, block_sum)
            residual_kernel[(batch * num_blocks,)](*step, BLOCKS=blocks)
            draw_kernel[(batch,)](*step, tokens, num_accepted, status, BLOCKS=blocks, ROWS=triton.next_power_of_2(rows))
    return tokens, num_accepted, status


implement("speculative_step_triton", speculative_step)
