"""``verify_tree``: ``measure``, of every row of the nodes that count, and of q of rows that have children; with filters
``select``, and for rule `walk` the races of all rows; then ``decide``: one program for each sequence goes through its
tree. Of the rows, it reads only those that its path enters."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import ops
from .core import TREE_WALK
from .dependent import wait_for_earlier
from .kinds import Scratch, kind_of
from .launch import (
    NO_STATISTICS,
    Given,
    contiguous,
    dense_rows,
    device_guard,
    number_of_blocks,
    padded_blocks,
    pieces_of_statistics,
    pitch_of,
    rows_on_device,
)
from .rows import NO_ROWS
from .siblings import test_tree
from .stages import find_statistics
from .tables import visits_at_once
from .tree import emit_path, walk_tree
from .verify import Step

MOST_VISITS = 4  # blocks that are weighed at once; with more, there are too few registers for the tree beside them


@triton.jit(do_not_specialize=["depth"])
def decide_tree_kernel(
    step,  # Step, whose drafts are the nodes
    depth,  # D
    raced,  # (scores, winners) of rule `walk`, else None
    visits,  # as in ``decide``; None with rule `walk`
    outputs,  # path, tokens: [B, D+1]; num_accepted, num_emitted, status: [B]
    RULE: tl.constexpr,
    BLOCKS: tl.constexpr,
    NODES: tl.constexpr,  # N or more, a power of 2
    COLUMNS: tl.constexpr,  # D + 1 or more, a power of 2
    VISITS: tl.constexpr,  # blocks that are weighed at once
    DEPENDENT: tl.constexpr,
):
    wait_for_earlier(DEPENDENT)
    b = tl.program_id(0).to(tl.int64)
    if RULE == TREE_WALK:
        row, level, status, token = walk_tree(step, b, depth, raced, RULE, BLOCKS, NODES)
    else:
        if tl.load(step.target.sampling.temperature_ptr + b) == 0.0:
            row, level, status, token = walk_tree(step, b, depth, raced, RULE, BLOCKS, NODES)
        else:
            row, level, status, token = test_tree(step, b, depth, visits, RULE, BLOCKS, NODES, VISITS)
    emit_path(step, b, depth, row, level, status, token, outputs, COLUMNS)


def verify_tree(
    target_logits, node_tokens, parents, draft_logits, d2t, num_nodes, sampling, seed, position, rule, depth
):
    sampling, (batch, rows, vocabulary) = ops.SamplingTensors(*sampling), target_logits.shape
    device, num_blocks = target_logits.device, number_of_blocks(vocabulary)

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    path, tokens = (empty(batch, depth + 1, dtype=torch.int64) for _ in range(2))
    results = (path, tokens, *(empty(batch, dtype=torch.int32) for _ in range(3)))
    if batch == 0:
        return results
    target_logits, full_q = dense_rows(target_logits), draft_logits is not None
    draft_logits = dense_rows(draft_logits) if full_q else None
    given = Given(
        sampling, seed, position, node_tokens, parents,
        (target_logits, draft_logits, contiguous(d2t) if full_q else None, contiguous(num_nodes)), results,
    )  # fmt: skip
    strides, draft_strides = target_logits.stride(), draft_logits.stride() if full_q else None
    form = "verify_tree", rule, depth, given.forms, strides, draft_strides
    # Row N of q is that of the last node, which has no children.
    num_rows, filtered = (batch * rows, batch * (rows - 1)), sampling.filters is not None
    races, blocks = rule == TREE_WALK.value, padded_blocks(num_blocks)
    kind = kind_of(form, device, lambda: Scratch(
        *pieces_of_statistics(num_rows[0], num_blocks, filtered),
        *(pieces_of_statistics(num_rows[1], num_blocks, filtered) if full_q else NO_STATISTICS),
        *[(dtype, (num_rows[0], pitch_of(num_blocks))) if races else None for dtype in (torch.float32, torch.int32)],
        *((None, None) if races else ((torch.int32, (batch, 2, blocks)), (torch.float32, (batch, blocks)))),
    ))  # fmt: skip
    memory, scratch = kind.allocate()
    on_device, (p, q, ids, limits, *outputs) = given.pointers(kind)
    target = rows_on_device(p, strides[:2], vocabulary, num_blocks, None, on_device, (rows, 1), scratch[:5])
    draft = NO_ROWS
    if draft_strides is not None:
        width, its_rows = draft_logits.shape[2], (rows - 1, 1)
        draft = rows_on_device(q, draft_strides[:2], width, num_blocks, ids, on_device, its_rows, scratch[5:10])
    step = Step(target, draft, None, None, limits, rows - 1)
    raced, visits = (tuple(scratch[10:12]), None) if races else (None, tuple(scratch[12:]))
    table = sampling.table_ids is not None
    with device_guard(target_logits):
        find_statistics(kind, target, draft, limits, batch, rows, raced=raced)
        kind.launch(
            decide_tree_kernel, (batch, 1, 1), step, depth, raced, visits, tuple(outputs), RULE=rule, BLOCKS=blocks,
            NODES=triton.next_power_of_2(max(rows - 1, 1)), COLUMNS=triton.next_power_of_2(depth + 1),
            VISITS=min(MOST_VISITS, visits_at_once(blocks, table, d2t is not None)), table=table,
        )  # fmt: skip
    kind.ended(memory)
    return results


ops.implement("verify_tree_triton", verify_tree)
