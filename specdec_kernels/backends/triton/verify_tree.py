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
from .kinds import FirstCall
from .launch import (
    Given,
    arguments_of,
    launch,
    number_of_blocks,
    padded_blocks,
    races_of,
    rows_on_device,
    statistics_of,
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
    batch, device = target_logits.shape[0], target_logits.device
    path = torch.empty(batch, depth + 1, dtype=torch.int64, device=device)
    counts = torch.empty(batch, dtype=torch.int32, device=device)
    results = path, torch.empty_like(path), counts, torch.empty_like(counts), torch.empty_like(counts)
    if batch == 0:
        return results
    sampling, rows = ops.SamplingTensors(*sampling), (target_logits, draft_logits)
    given = Given(sampling, seed, position, node_tokens, parents, (d2t, num_nodes), rows, results)
    launch(("verify_tree", rule, depth), given, lambda call: first_tree(call, rule, depth))
    return results


def first_tree(call: FirstCall, rule: int, depth: int) -> None:
    sampling, (ids, limits, p, q, *outputs) = arguments_of(call)
    batch, rows, vocabulary = p.shape
    num_blocks = number_of_blocks(vocabulary)
    target = rows_on_device(
        p, p.stride()[:2], vocabulary, num_blocks, None, sampling, (rows, 1),
        statistics_of(call, batch * rows, num_blocks, sampling),
    )  # fmt: skip
    draft = NO_ROWS
    if q is not None:  # row N of it is that of the last node, which has no children
        draft = rows_on_device(
            q, q.stride()[:2], q.shape[2], num_blocks, ids, sampling, (rows - 1, 1),
            statistics_of(call, batch * (rows - 1), num_blocks, sampling),
        )  # fmt: skip
    step, blocks = Step(target, draft, None, None, limits, rows - 1), padded_blocks(num_blocks)
    table = sampling.ids_ptr is not None
    raced = visits = None
    if rule == TREE_WALK.value:
        raced = races_of(call, batch * rows, num_blocks)
    else:
        visits = call.allocate(torch.int32, batch, 2, blocks), call.allocate(torch.float32, batch, blocks)
    find_statistics(call, target, draft, limits, batch, rows, raced=raced)
    call.launch(
        decide_tree_kernel, (batch, 1, 1), step, depth, raced, visits, tuple(outputs), RULE=rule, BLOCKS=blocks,
        NODES=triton.next_power_of_2(max(rows - 1, 1)), COLUMNS=triton.next_power_of_2(depth + 1),
        VISITS=min(MOST_VISITS, visits_at_once(blocks, table, ids is not None)), table=table,
    )  # fmt: skip


ops.implement("verify_tree_triton", verify_tree)
