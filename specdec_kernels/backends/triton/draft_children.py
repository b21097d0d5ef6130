"""``draft_children``: ``measure``, with filters ``select``, then a launch in which one program for each row takes the
first child from the block that leads, finds out what that has next, and so on: it reads as many blocks as there are
children. The most likely child of a block is its largest logit, which is known. Sampled children arrive in a race of
single tokens, not of blocks, of which no bound is known before its noise is: there, a launch before finds the first
one of every block, one program for each (row, block).

For the most likely children, a few operations on [B] numbers come before, which give greedy sequences temperature 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import ops
from .core import BLOCK, DRAFT_FLAG_FACTOR, INFINITY, inverse, log_probability, row_fault, weight
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
from .random import DRAFT_TOKEN, noise
from .rows import NO_ROWS, load_block, load_row, load_token, target_ids, tokens_of
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
    offset_ptr,  # [B] int64
    score_ptr,  # [B, blocks] out: the largest score of every block
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


@triton.jit(do_not_specialize=["depth", "width"])
def decide_children_kernel(
    rows,  # as in ``first_children_kernel``
    depth,
    offset_ptr,  # None, as what follows: the most likely tokens, not sampled ones
    score_ptr,
    width,
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
    heads = tl.where(block_max >= cutoff, block_max, -INFINITY)
    if offset_ptr is not None:
        at = b * rows.num_blocks + blocks
        heads = tl.load(score_ptr + at, mask=blocks < rows.num_blocks, other=-INFINITY)
    # Of every block: the score of its next child, and the score and the token of the last one that it had.
    last_scores, last_tokens = tl.full([BLOCKS], INFINITY, tl.float32), tl.full([BLOCKS], -1, tl.int32)
    most = tl.where(fault != 0, 0, tl.where(greedy, 1, width))
    count, head = most * 0, tl.max(tl.where(fault == 0, heads, -INFINITY), 0)
    while (count < most) & (head > -INFINITY):
        its_block = tl.argmax(heads, 0)  # the first of a tie
        here = blocks == its_block
        last_score = tl.max(tl.where(here, last_scores, -INFINITY), 0)
        last_token = tl.max(tl.where(here, last_tokens, -1), 0)
        ids, score = tokens_of(its_block), scores_of(rows, b, j, its_block, offset_ptr, largest, cutoff)
        # What is compared was compiled here: elsewhere a score might differ in its last bit, and a token come again.
        score = tl.where((score < last_score) | ((score == last_score) & (ids > last_token)), score, -INFINITY)
        its_score = tl.max(score, 0)
        token = tl.min(tl.where(score == its_score, ids, 0x7FFFFFFF), 0)
        logit, raw = load_token(rows, b, j, token)
        log_q = tl.where(greedy, 0.0, log_probability(logit, inverse(temperature), lse, cutoff))
        found = its_score > -INFINITY  # as in ``first_children_kernel``, but for a weight that rounds to 0
        tl.store(tokens_ptr + b * width + count, target_ids(rows, token), mask=found)
        tl.store(log_q_ptr + b * width + count, log_q, mask=found)
        count += found.to(tl.int32)
        heads = tl.where(here, tl.max(tl.where(ids == token, -INFINITY, score), 0), heads)
        last_scores, last_tokens = tl.where(here, its_score, last_scores), tl.where(here, token, last_tokens)
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
    find_statistics(call, rows, NO_ROWS, None, batch, 1, depth)
    scores = None
    if offset is not None:
        scores, grid = call.allocate(torch.float32, batch, num_blocks), (batch * num_blocks, 1, 1)
        call.launch(first_children_kernel, grid, rows, depth, offset, scores, BLOCKS=blocks, table=table)
    call.launch(
        decide_children_kernel, (batch, 1, 1), rows, depth, offset, scores, width, tuple(outputs), BLOCKS=blocks,
        SLOTS=triton.next_power_of_2(width), table=table,
    )  # fmt: skip


ops.implement("draft_children_triton", draft_children)
