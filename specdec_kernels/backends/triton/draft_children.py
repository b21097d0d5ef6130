"""``draft_children``: ``measure``, with filters ``select``, then two launches. One program for each (row, block) finds
the first child in its block. Then one program for each row takes the first of these, looks for the next one in the same
block, and so on: as many blocks are read again as there are children.

For the most likely children, a few operations on [B] numbers come before, which give greedy sequences temperature 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import ops
from .core import (
    BLOCK,
    DRAFT_FLAG_FACTOR,
    DRAFT_TOKEN,
    INFINITY,
    inverse,
    log_probability,
    noise,
    row_fault,
    weight,
)
from .dependent import let_next_begin, wait_for_earlier
from .kinds import FirstCall
from .launch import (
    Given,
    arguments_of,
    launch,
    number_of_blocks,
    padded_blocks,
    rows_on_device,
    statistics_of,
)
from .rows import NO_ROWS, load_block, load_row, load_token, target_ids
from .stages import find_statistics


@triton.jit
def scores_of(rows, b, j, block, offset_ptr, largest, cutoff):
    """[1024] scores of a block's tokens, of which the largest are the children: in a race w / E (its first arrivals are
    draws without replacement), else logits. -inf: no child."""
    x = load_block(rows, b, j, block)
    temperature = tl.load(rows.sampling.temperature_ptr + b)
    score = tl.where(x >= cutoff, x, -INFINITY)
    if offset_ptr is not None:
        seed, position = tl.load(rows.sampling.seed_ptr + b), tl.load(rows.sampling.position_ptr + b)
        E = noise(block * BLOCK, BLOCK, seed, position, tl.load(offset_ptr + b), DRAFT_TOKEN)
        w = tl.where(x >= cutoff, weight(x, largest, inverse(temperature)), 0.0)
        arrival = w / E
        score = tl.where(temperature == 0.0, score, tl.where(arrival > 0.0, arrival, -INFINITY))
    return score


@triton.jit(do_not_specialize=["depth"])
def first_children_kernel(
    rows,  # Rows [B, 1, V]
    depth,  # how many tokens of the path the penalties count
    offset_ptr,  # [B] int64 for sampled children; None: the most likely tokens
    score_ptr,  # [B, blocks] out: the largest score of every block
    winner_ptr,  # out: its token
    BLOCKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (block and row)."""
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    at = tl.program_id(0).to(tl.int64)
    b, block = at // rows.num_blocks, at % rows.num_blocks
    j = b * 0 + depth
    largest, lse, cutoff, mass, block_max = load_row(rows, b, j, BLOCKS)
    score = scores_of(rows, b, j, block, offset_ptr, largest, cutoff)
    tl.store(score_ptr + at, tl.max(score, 0))
    tl.store(winner_ptr + at, block * BLOCK + tl.argmax(score, 0))


@triton.jit(do_not_specialize=["depth", "width"])
def decide_children_kernel(
    rows,  # as in ``first_children_kernel``, also what follows
    depth,
    offset_ptr,
    width,
    score_ptr,
    winner_ptr,
    outputs,  # tokens, log_q: [B, width]; cutoff, lse, status: [B] each
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,  # width or more, a power of 2
    DEPENDENT: tl.constexpr,
):
    wait_for_earlier(DEPENDENT)
    tokens_ptr, log_q_ptr, cutoff_ptr, lse_ptr, status_ptr = outputs
    b = tl.program_id(0).to(tl.int64)
    j = b * 0 + depth
    largest, lse, cutoff, mass, block_max = load_row(rows, b, j, BLOCKS)
    temperature = tl.load(rows.sampling.temperature_ptr + b)
    fault = row_fault(largest * inverse(temperature))
    greedy = temperature == 0.0
    blocks = tl.arange(0, BLOCKS)
    inside = blocks < rows.num_blocks
    heads = tl.load(score_ptr + b * rows.num_blocks + blocks, mask=inside, other=-INFINITY)
    winners = tl.load(winner_ptr + b * rows.num_blocks + blocks, mask=inside, other=0)
    most = tl.where(fault != 0, 0, tl.where(greedy, 1, width))
    count, head = most * 0, tl.max(tl.where(fault == 0, heads, -INFINITY), 0)
    while (count < most) & (head > -INFINITY):
        its_block = tl.argmax(heads, 0)  # the first of a tie
        token = tl.sum(tl.where(blocks == its_block, winners, 0), 0)
        logit, raw = load_token(rows, b, j, token)
        log_q = tl.where(greedy, 0.0, log_probability(logit, inverse(temperature), lse, cutoff))
        tl.store(tokens_ptr + b * width + count, target_ids(rows, token))
        tl.store(log_q_ptr + b * width + count, log_q)
        count += 1
        score = scores_of(rows, b, j, tl.cast(its_block, tl.int64), offset_ptr, largest, cutoff)
        ids = tl.cast(its_block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        later = (score < head) | ((score == head) & (ids > token))
        # The same score compiled twice might differ in its last bit: no token may come again.
        score = tl.where(later & (ids != token), score, -INFINITY)
        heads = tl.where(blocks == its_block, tl.max(score, 0), heads)
        winners = tl.where(blocks == its_block, tl.cast(its_block, tl.int64) * BLOCK + tl.argmax(score, 0), winners)
        head = tl.max(heads, 0)
    slots = tl.arange(0, SLOTS)
    rest = (slots >= count) & (slots < width)
    tl.store(tokens_ptr + b * width + slots, tl.full([SLOTS], -1, tl.int64), mask=rest)
    tl.store(log_q_ptr + b * width + slots, tl.full([SLOTS], -INFINITY, tl.float32), mask=rest)
    tl.store(cutoff_ptr + b, tl.where(fault == 0, cutoff, -INFINITY))
    tl.store(lse_ptr + b, tl.where(fault == 0, lse, float("nan")))
    tl.store(status_ptr + b, fault * DRAFT_FLAG_FACTOR)


def of_likely_children(sampling: ops.SamplingTensors) -> ops.SamplingTensors:
    """Greedy sequences have the likely children of temperature 1 without filters."""
    greedy, filters = sampling.temperature == 0, sampling.filters
    if filters is not None:
        off = torch.zeros_like(filters)
        off[:, 1] = 1.0
        filters = torch.where(greedy[:, None], off, filters)
    return sampling._replace(temperature=torch.where(greedy, 1.0, sampling.temperature), filters=filters)


def draft_children(logits, sampling, drafts, d2t, seed, position, offset, width, sampled):
    sampling, batch, device = ops.SamplingTensors(*sampling), logits.shape[0], logits.device
    tokens = torch.empty(batch, width, dtype=torch.int64, device=device)
    log_q = torch.empty(batch, width, dtype=torch.float32, device=device)
    cutoff, lse = (torch.empty(batch, dtype=torch.float32, device=device) for _ in range(2))
    results = tokens, log_q, cutoff, lse, torch.empty(batch, dtype=torch.int32, device=device)
    if batch == 0:
        return results
    sampling = sampling if sampled else of_likely_children(sampling)
    starts = offset if sampled else None
    given = Given(sampling, seed, position, drafts, None, (d2t, starts), (logits,), results)
    launch(("draft_children", width), given, lambda call: first_children(call, width))
    return results


def first_children(call: FirstCall, width: int) -> None:
    sampling, (ids, offset, logits, *outputs) = arguments_of(call)
    batch, vocabulary = logits.shape
    num_blocks, depth = number_of_blocks(vocabulary), sampling.drafts_stride
    blocks, table = padded_blocks(num_blocks), sampling.ids_ptr is not None
    rows = rows_on_device(
        logits, (logits.stride(0), 0), vocabulary, num_blocks, ids, sampling, (1, 0),
        statistics_of(call, batch, num_blocks, sampling),
    )  # fmt: skip
    scores, winners = (call.allocate(dtype, batch, num_blocks) for dtype in (torch.float32, torch.int64))
    find_statistics(call, rows, NO_ROWS, None, batch, 1, depth)
    call.launch(
        first_children_kernel, (batch * num_blocks, 1, 1), rows, depth, offset, scores, winners, BLOCKS=blocks,
        table=table,
    )  # fmt: skip
    call.launch(
        decide_children_kernel, (batch, 1, 1), rows, depth, offset, width, scores, winners, tuple(outputs),
        BLOCKS=blocks, SLOTS=triton.next_power_of_2(width), table=table,
    )  # fmt: skip


ops.implement("draft_children_triton", draft_children)
