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
from .launch import (
    NOT_FILTERED,
    Filtered,
    contiguous,
    dense_rows,
    device_guard,
    number_of_blocks,
    padded_blocks,
    rows_on_device,
    sampling_on_device,
)
from .rows import NO_ROWS
from .siblings import test_tree
from .stages import find_statistics
from .tables import options
from .tree import emit_path, walk_tree
from .verify import Step


@triton.jit(do_not_specialize=["depth"])
def decide_tree_kernel(
    step,  # Step, whose drafts are the nodes
    depth,  # D
    raced,  # (scores, winners) of rule `walk`, else None
    outputs,  # path, tokens: [B, D+1]; num_accepted, num_emitted, status: [B]
    RULE: tl.constexpr,
    BLOCKS: tl.constexpr,
    NODES: tl.constexpr,  # N or more, a power of 2
    COLUMNS: tl.constexpr,  # D + 1 or more, a power of 2
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
            row, level, status, token = test_tree(step, b, depth, RULE, BLOCKS, NODES)
    emit_path(step, b, depth, row, level, status, token, outputs, COLUMNS)


def verify_tree(
    target_logits, node_tokens, parents, draft_logits, d2t, num_nodes, sampling, seed, position, rule, depth
):
    sampling, (batch, rows, vocabulary) = ops.SamplingTensors(*sampling), target_logits.shape
    device, num_blocks, limits = target_logits.device, number_of_blocks(vocabulary), contiguous(num_nodes)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    path, tokens = (empty(batch, depth + 1, dtype=torch.int64) for _ in range(2))
    outputs = (path, tokens, *(empty(batch, dtype=torch.int32) for _ in range(3)))
    if batch > 0:
        on_device = sampling_on_device(sampling, seed, position, node_tokens, parents)
        # Row N of q is that of the last node, which has no children.
        num_target_rows, num_draft_rows = batch * rows, 0 if draft_logits is None else batch * (rows - 1)
        num_rows = num_target_rows + num_draft_rows
        block_max, block_sum = empty(2, num_rows, num_blocks).unbind()
        filtered = NOT_FILTERED if sampling.filters is None else Filtered.empty(num_rows, num_blocks, device)

        def rows_of(logits: torch.Tensor, ids: torch.Tensor | None, rows: int, slots: slice):
            logits = dense_rows(logits)
            return rows_on_device(
                logits, (logits.stride(0), logits.stride(1)), vocabulary, ids, on_device, (rows, 1),
                (block_max[slots], block_sum[slots]), filtered=filtered.of_rows(slots),
            )  # fmt: skip

        target = rows_of(target_logits, None, rows, slice(num_target_rows))
        draft = NO_ROWS
        if draft_logits is not None:
            draft = rows_of(draft_logits, contiguous(d2t), rows - 1, slice(num_target_rows, None))
        step = Step(target, draft, None, None, limits, rows - 1)
        raced = None
        if rule == TREE_WALK.value:
            raced = (empty(num_target_rows, num_blocks), empty(num_target_rows, num_blocks, dtype=torch.int32))
        with device_guard(target_logits):
            find_statistics(target, draft, limits, batch, rows, raced=raced)
            decide_tree_kernel[(batch,)](
                step, depth, raced, outputs, RULE=rule, BLOCKS=padded_blocks(num_blocks),
                NODES=triton.next_power_of_2(max(rows - 1, 1)), COLUMNS=triton.next_power_of_2(depth + 1),
                **options("decide_tree_kernel", device, True),
            )  # fmt: skip
    return outputs


ops.implement("verify_tree_triton", verify_tree)
