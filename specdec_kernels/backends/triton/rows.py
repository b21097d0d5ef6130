"""Rows of logits in memory: what describes them to kernels, and how a block is loaded, adjusted and summed up."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .core import BLOCK, INFINITY, adjust, merge

PART = tl.constexpr(128)  # consecutive logits whose largest one filters ask for
PARTS_OF_A_BLOCK = tl.constexpr(BLOCK.value // PART.value)


class Sampling(NamedTuple):
    """``ops.SamplingTensors`` as pointers to dense tensors, with seeds, positions and drafts. Where one is None, the
    kernel is compiled without the code for it."""

    temperature_ptr: Any  # [B]
    filters_ptr: Any  # [B, 3] or None
    penalties_ptr: Any  # [B, 3] or None
    ids_ptr: Any  # [B, N] or None: no table
    bias_ptr: Any  # [B, N]
    in_prompt_ptr: Any  # [B, N]
    count_ptr: Any  # [B, N]
    num_entries: Any  # N
    ends_ptr: Any  # [B, E] or None
    num_ends: Any  # E
    first_end_ptr: Any  # [B]
    seed_ptr: Any  # [B]
    position_ptr: Any  # [B], of the step's first token
    drafts_ptr: Any  # [B, drafts_stride], the step's drafts, or the nodes of a tree
    drafts_stride: Any
    parents_ptr: Any  # [B, drafts_stride], the nodes that those of a tree are children of; None: no tree


class Rows(NamedTuple):
    """Raw logits of a model, and where the statistics of their rows are. Row (b, j) is row j of sequence b in a step;
    kernels hold b and j as int64, since rows may lie more than 2^31 elements apart."""

    sampling: Sampling | None  # must come first: Triton 3.6 loses the constants of a nested tuple that comes later
    ptr: Any  # logits (b, j, v) at stride_b b + stride_j j + v
    stride_b: Any
    stride_j: Any
    vocabulary: Any
    num_blocks: Any  # of the target's vocabulary; the row's own may be smaller
    pitch: Any  # from the statistics of a row's blocks to those of the next row: num_blocks, to a multiple of 16
    d2t_ptr: Any  # [vocabulary] target ids of the row's tokens, or None: they have the target's ids
    max_ptr: Any  # largest logit of block i of row (b, j) at ``blocks_of`` the row + i
    sum_ptr: Any  # there, the sum of the block's weights relative to its largest logit
    part_max_ptr: Any  # largest logits of the parts of row (b, j), beside those of other rows; None: no filters
    scratch_ptr: Any  # of ``select``: [rows, number of parts + LIST] int64
    raw_max_ptr: Any  # the same for raw logits at temperature 1; None unless log-probabilities are wanted
    raw_sum_ptr: Any
    cutoff_ptr: Any  # of row (b, j) at stats_stride_b b + stats_stride_j j; None: no filters
    stats_stride_b: Any
    stats_stride_j: Any
    allowed_ptr: Any  # bits of what may follow row (b, j) at allowed_stride_b b + allowed_stride_j j; None: all may
    allowed_stride_b: Any
    allowed_stride_j: Any
    masked_rows: Any  # rows j < masked_rows have such bits; in others all tokens may follow
    num_words: Any  # of a row's bits


# In place of Rows: Triton 3.6 cannot compare a tuple with None.
NO_ROWS = Rows(*[None] * len(Rows._fields))


@triton.jit
def find(sorted_ptr, size, ids):
    """(index, whether it was found) of every id in a list of ``size`` >= 1 ascending ids."""
    place = (ids * 0).to(tl.int32)
    left = size + tl.minimum(tl.program_id(2), 0)  # + 0: Triton 3.6 fails on loops that it knows to run never
    while left > 1:  # the last entry <= id is among those ``left`` from place on
        half = left // 2
        place = tl.where(tl.load(sorted_ptr + (place + half)) <= ids, place + half, place)
        left -= half
    return place, tl.load(sorted_ptr + place) == ids


@triton.jit
def target_ids(rows, index):
    """The target's ids of the tokens at ``index`` of a row; -1 beyond the row's vocabulary."""
    inside = index < rows.vocabulary
    if rows.d2t_ptr is None:
        return tl.where(inside, index, -1)
    else:
        return tl.load(rows.d2t_ptr + index, mask=inside, other=-1)


@triton.jit
def masked(x, ids, rows, b, j):
    """Logits ``x`` of the tokens ``ids`` (a scalar or a vector; -1: none) of row (b, j), those that may not follow as
    -inf."""
    if rows.allowed_ptr is not None:
        ids = tl.cast(ids, tl.int32)
        num_words, otherwise = tl.where(j < rows.masked_rows, rows.num_words, 0), tl.where(j < rows.masked_rows, 0, -1)
        at = b * rows.allowed_stride_b + j * rows.allowed_stride_j + ids // 32
        bits = tl.load(rows.allowed_ptr + at, mask=(ids >= 0) & (ids // 32 < num_words), other=otherwise)
        x = tl.where((bits >> (ids % 32)) & 1 != 0, x, -INFINITY)
    return x


@triton.jit
def parent_of(sampling, b, node):
    """-1 for a child of the root, and where the parent does not come before the child, so that no path is endless."""
    parent = tl.load(sampling.parents_ptr + b * sampling.drafts_stride + node).to(tl.int32)
    return tl.where((parent >= 0) & (parent < node), parent, -1)


@triton.jit
def place_of(sampling, b, j):
    """How many of a step's tokens come before that of row j: j drafts, in a tree those on the path to the row."""
    if sampling.parents_ptr is None:
        return j
    else:
        node, place = j.to(tl.int32) - 1, j * 0
        while node >= 0:
            node, place = parent_of(sampling, b, node), place + 1
        return place


@triton.jit
def adjusted(x, ids, sampling, b, j):
    """Logits ``x`` of the tokens ``ids`` of row (b, j) after bias and penalties: those after the first j drafts, in a
    tree after node j - 1 and its ancestors. j may be a vector as ``ids`` is, but not in a tree."""
    if sampling.ids_ptr is not None:
        place, listed = find(sampling.ids_ptr + b * sampling.num_entries, sampling.num_entries, ids)
        at = b * sampling.num_entries + place
        bias = tl.load(sampling.bias_ptr + at, mask=listed, other=0.0)
        in_prompt = tl.load(sampling.in_prompt_ptr + at, mask=listed, other=0)
        count = tl.load(sampling.count_ptr + at, mask=listed, other=0)
        generated = j.to(tl.int32)
        if sampling.parents_ptr is None:
            for i in range(0, generated if len(j.shape) == 0 else tl.max(generated)):
                same = ids == tl.load(sampling.drafts_ptr + b * sampling.drafts_stride + i)
                count += (same & (i < generated)).to(tl.int32)
        else:
            node = generated - 1
            generated = node * 0
            while node >= 0:
                token = tl.load(sampling.drafts_ptr + b * sampling.drafts_stride + node)
                count += (ids == token).to(tl.int32)
                generated += 1
                node = parent_of(sampling, b, node)
        repetition, presence, frequency = tl.full([], 1.0, tl.float32), 0.0, 0.0
        if sampling.penalties_ptr is not None:
            repetition = tl.load(sampling.penalties_ptr + b * 3)
            presence = tl.load(sampling.penalties_ptr + b * 3 + 1)
            frequency = tl.load(sampling.penalties_ptr + b * 3 + 2)
        x = adjust(x, bias, in_prompt, count, repetition, presence, frequency)
        if sampling.ends_ptr is not None:
            early = tl.load(sampling.position_ptr + b) + generated < tl.load(sampling.first_end_ptr + b)
            for i in range(0, sampling.num_ends):
                x = tl.where(early & (ids == tl.load(sampling.ends_ptr + b * sampling.num_ends + i)), -INFINITY, x)
    return x


@triton.jit
def load_raw(rows, b, j, index, there):
    """Raw logits of the tokens at ``index`` of row (b, j) as float32, -inf where one is not ``there``."""
    if len(j.shape) == 0:
        pointers = rows.ptr + b * rows.stride_b + j * rows.stride_j + index
    else:  # Triton cannot move a tensor of pointers, of one for each row, to other threads
        pointers = rows.ptr + (b * rows.stride_b + j * rows.stride_j + index)
    return tl.load(pointers, mask=there, other=-INFINITY).to(tl.float32)


@triton.jit
def adjust_tokens(x, rows, b, j, index):
    """The logits that ``load_raw`` loaded, after mask, bias and penalties."""
    if rows.allowed_ptr is not None:
        x = masked(x, target_ids(rows, index), rows, b, j)
    if rows.sampling.ids_ptr is None:
        return x
    else:
        ids = target_ids(rows, index)
        return tl.where(ids >= 0, adjusted(x, ids, rows.sampling, b, j), -INFINITY)


@triton.jit
def load_tokens(rows, b, j, index):
    """Adjusted logits of the tokens at ``index``, -inf beyond the row's vocabulary."""
    return adjust_tokens(load_raw(rows, b, j, index, index < rows.vocabulary), rows, b, j, index)


@triton.jit
def tokens_of(block):
    """[1024] the tokens of a block, [N, 1024] of [N] blocks; int32 suffices within a row."""
    first = tl.cast(block, tl.int32) * BLOCK
    if len(first.shape) == 0:
        return first + tl.arange(0, BLOCK)
    else:
        return first[:, None] + tl.arange(0, BLOCK)[None, :]


@triton.jit
def load_block(rows, b, j, block):
    """[1024] adjusted logits of a block, [N, 1024] of [N] blocks."""
    return load_tokens(rows, b, j, tokens_of(block))


@triton.jit
def load_token(rows, b, j, index):
    """(adjusted logit, raw logit) of one token, by its index in the row's own vocabulary; or of one in each of several
    rows j, -inf where there is none (-1)."""
    raw = load_raw(rows, b, j, index, index >= 0)
    return adjust_tokens(raw, rows, b, j, index), raw


# ---- Statistics ----------------------------------------------------------------------------------------------


@triton.jit
def stats_row(rows, b, j):
    return b * rows.stats_stride_b + j * rows.stats_stride_j


@triton.jit
def blocks_of(rows, b, j):
    """Where statistics of the blocks of row (b, j) begin: at a multiple of 16, as Triton sees by the pitch. So it gives
    4 blocks of a row to a thread, and a whole row to a warp, where several rows are merged."""
    return stats_row(rows, b, j) * rows.pitch


@triton.jit
def load_cutoff(rows, b, j):
    if rows.cutoff_ptr is None:
        return tl.full([], -INFINITY, tl.float32)
    else:
        return tl.load(rows.cutoff_ptr + stats_row(rows, b, j))


@triton.jit
def load_blocks(rows, b, j, BLOCKS: tl.constexpr):
    """([BLOCKS] maxima, [BLOCKS] sums) of a row."""
    at, block = blocks_of(rows, b, j), tl.arange(0, BLOCKS)
    block_max = tl.load(rows.max_ptr + at + block, mask=block < rows.num_blocks, other=-INFINITY)
    return block_max, tl.load(rows.sum_ptr + at + block, mask=block < rows.num_blocks, other=0.0)


@triton.jit
def load_row(rows, b, j, BLOCKS: tl.constexpr):
    """(largest logit, lse, cutoff, [BLOCKS] masses, [BLOCKS] maxima) of row (b, j)."""
    block_max, block_sum = load_blocks(rows, b, j, BLOCKS)
    largest, lse, mass = merge(block_max, block_sum, tl.load(rows.sampling.temperature_ptr + b), 0)
    return largest, lse, load_cutoff(rows, b, j), mass, block_max


@triton.jit
def load_rows(rows, b, j, there, BLOCKS: tl.constexpr):
    """The same of several rows j [N], without their masses: ([N] largest logits, [N] lse, [N] cutoffs, [N, BLOCKS]
    maxima). A row that is not ``there`` is empty."""
    block = tl.arange(0, BLOCKS)
    at = blocks_of(rows, b, j)[:, None] + block[None, :]
    inside = there[:, None] & (block < rows.num_blocks)[None, :]
    block_max = tl.load(rows.max_ptr + at, mask=inside, other=-INFINITY)
    block_sum = tl.load(rows.sum_ptr + at, mask=inside, other=0.0)
    largest, lse, mass = merge(block_max, block_sum, tl.load(rows.sampling.temperature_ptr + b), 1)
    cutoff = tl.full(j.shape, -INFINITY, tl.float32)
    if rows.cutoff_ptr is not None:
        cutoff = tl.load(rows.cutoff_ptr + stats_row(rows, b, j), mask=there, other=-INFINITY)
    return largest, lse, cutoff, block_max


@triton.jit
def load_limit(num_drafts_ptr, b, num_drafts):
    """How many of a sequence's drafts count."""
    if num_drafts_ptr is None:
        return num_drafts
    else:
        return tl.minimum(tl.load(num_drafts_ptr + b), num_drafts).to(tl.int32)


@triton.jit
def is_drafted_from(draft, b, i, limit):
    """Whether any of the ``limit`` drafts that count was drawn from row i of q: in a tree, a node's children were."""
    if draft.sampling.parents_ptr is None:
        return i < limit
    else:
        first, found = i.to(tl.int32), tl.full([], 0, tl.int32)
        while (first < limit) & (found == 0):
            node = first + tl.arange(0, 128)  # children come after their parent, which is node i - 1
            at = b * draft.sampling.drafts_stride + node
            parent = tl.load(draft.sampling.parents_ptr + at, mask=node < limit, other=-2)
            found = tl.max((parent == i - 1).to(tl.int32), 0)
            first += 128
        return found > 0
