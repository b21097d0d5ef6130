"""The tree of a sequence, and rule `walk`, which is greedy decoding in all rules.

Row 0 is after the known text, row 1 + i after node i. A program holds the parents and tokens of its sequence's nodes in
vectors, and finds children in them; paths upwards follow ``parent_of``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .core import DRAFT_OUT_OF_RANGE, TREE_WALK, inverse, row_fault
from .draw import argmax, race_winner
from .rows import load_limit, load_row, parent_of


@triton.jit
def load_nodes(step, b, NODES: tl.constexpr):
    """([NODES] parents, [NODES] tokens) of the nodes that count; the others are children of no row."""
    node, sampling = tl.arange(0, NODES), step.target.sampling
    counts, at = node < load_limit(step.num_drafts_ptr, b, step.num_drafts), b * sampling.drafts_stride + node
    parents = tl.load(sampling.parents_ptr + at, mask=counts, other=-2).to(tl.int32)
    return parents, tl.load(sampling.drafts_ptr + at, mask=counts, other=-1)


@triton.jit
def find_child(step, parents, tokens, row, after, chosen, NODES: tl.constexpr):
    """(the first child of a row that comes after the node ``after`` and is ``chosen``, which tokens out of range never
    are, or NODES; the status flags of the children that were passed over)."""
    node = tl.arange(0, NODES)
    children = (parents == row - 1) & (node >= row) & (node > after)
    in_range = (tokens >= 0) & (tokens < step.target.vocabulary)
    found = tl.min(tl.where(children & in_range & chosen, node, NODES), 0)
    out_of_range = children & (node < found) & (tokens != -1) & (in_range == 0)
    return found, tl.max(tl.where(out_of_range, DRAFT_OUT_OF_RANGE, 0), 0)


@triton.jit
def walk_tree(step, b, depth, raced, RULE: tl.constexpr, BLOCKS: tl.constexpr, NODES: tl.constexpr):
    """Goes on to the child that holds the token drawn at a row, while there is one.

    Returns (the last row, its level, status, the token drawn there, -1 if the row has no distribution)."""
    parents, tokens = load_nodes(step, b, NODES)
    temperature = tl.load(step.target.sampling.temperature_ptr + b)
    row, level, walking = b * 0, (b * 0).to(tl.int32), True
    status, token = tl.full([], 0, tl.int32), tl.full([], -1, tl.int64)
    while walking:
        largest, lse, cutoff, mass, block_max = load_row(step.target, b, row, BLOCKS)
        fault = row_fault(largest * inverse(temperature))
        status, token, walking = status | fault, tl.full([], -1, tl.int64), False
        if fault == 0:
            if RULE == TREE_WALK:
                if temperature == 0.0:
                    token = argmax(step.target, b, row, block_max, largest, BLOCKS)
                else:
                    token = race_winner(step.target, b, row, raced, block_max, largest, 0)
            else:
                token = argmax(step.target, b, row, block_max, largest, BLOCKS)
            after = tl.where(level < depth, -1, NODES)
            child, flags = find_child(step, parents, tokens, row, after, tokens == token, NODES)
            status, walking = status | flags, child < NODES
            row = tl.where(walking, child + 1, row)
            level = tl.where(walking, level + 1, level)
    return row, level, status, token


@triton.jit
def emit_path(step, b, depth, row, level, status, token, outputs, COLUMNS: tl.constexpr):
    """Stores the path to a row, its tokens, and then ``token`` unless that is -1."""
    path_ptr, tokens_ptr, num_accepted_ptr, num_emitted_ptr, status_ptr = outputs
    first, column = b * (depth + 1), tl.arange(0, COLUMNS)
    beyond = (column >= level) & (column <= depth)
    tl.store(path_ptr + first + column, tl.full([COLUMNS], -1, tl.int64), mask=beyond)
    tl.store(tokens_ptr + first + column, tl.where(column == level, token, -1), mask=beyond)
    sampling, node, i = step.target.sampling, row.to(tl.int32) - 1, level - 1
    while i >= 0:
        tl.store(path_ptr + first + i, node.to(tl.int64))
        tl.store(tokens_ptr + first + i, tl.load(sampling.drafts_ptr + b * sampling.drafts_stride + node))
        node, i = parent_of(sampling, b, node), i - 1
    tl.store(num_accepted_ptr + b, level)
    tl.store(num_emitted_ptr + b, level + tl.where(token >= 0, 1, 0))
    tl.store(status_ptr + b, status)
