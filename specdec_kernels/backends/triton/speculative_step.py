"""``speculative_step`` in two launches: ``measure`` finds the statistics of every block of logits, ``decide`` does the
rest, one program for each sequence.

With filters, ``select`` comes between them, which finds the cutoff of every row; with rule ``block``, ``sums``, which
examines the rows in place of ``decide`` and weighs the residuals that its decision depends on; with filters and rule
``coupled``, ``race``.
"""

from __future__ import annotations

import torch
import triton

from ... import ops
from .core import BLOCK_RULE, COUPLED_RULE
from .decide import decide_kernel
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
from .stages import find_statistics
from .sums import sums_kernel
from .tables import options, rows_at_once, visits_at_once
from .verify import Step
from .walk import Examined

PARTS = 16  # programs that share the blocks of a sequence's residuals, with rule `block`


def speculative_step(
    target_logits, draft_tokens, draft_logits, draft_cutoff, draft_lse, d2t, num_drafts, sampling, allowed,
    masked_drafts, seed, position, rule, log_probs,
):  # fmt: skip
    sampling, (batch, rows, vocabulary) = ops.SamplingTensors(*sampling), target_logits.shape
    device, num_blocks, limits = target_logits.device, number_of_blocks(vocabulary), contiguous(num_drafts)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    tokens = empty(batch, rows, dtype=torch.int64)
    num_accepted, status, num_emitted = (empty(batch, dtype=torch.int32) for _ in range(3))
    logs = [empty(batch, rows if log_probs else 0) for _ in range(2)]
    if batch > 0:
        on_device = sampling_on_device(sampling, seed, position, draft_tokens)
        full_q = draft_logits is not None and rows > 1
        weigh_draft = full_q and draft_lse is None
        num_target_rows, num_draft_rows = batch * rows, batch * (rows - 1) if weigh_draft else 0
        block_max, block_sum = empty(2, num_target_rows + num_draft_rows, num_blocks).unbind()
        raw_max, raw_sum = empty(2, num_target_rows, num_blocks).unbind() if log_probs else (None, None)
        filtered = NOT_FILTERED
        if sampling.filters is not None:
            filtered = Filtered.empty(num_target_rows + num_draft_rows, num_blocks, device)
        logits = dense_rows(target_logits)
        target = rows_on_device(
            logits, (logits.stride(0), logits.stride(1)), vocabulary, None, on_device, (rows, 1),
            (block_max[:num_target_rows], block_sum[:num_target_rows]), (raw_max, raw_sum),
            filtered, allowed,
        )  # fmt: skip
        draft = NO_ROWS
        if full_q:
            logits = dense_rows(draft_logits)
            draft = rows_on_device(
                logits, (logits.stride(0), logits.stride(1)), vocabulary, contiguous(d2t), on_device, (rows - 1, 1),
                (block_max[num_target_rows:], block_sum[num_target_rows:]) if weigh_draft else (None, None),
                filtered=filtered.of_rows(slice(num_target_rows, None)) if weigh_draft else NOT_FILTERED,
                allowed=None if allowed is None or masked_drafts == 0 else allowed[:, :masked_drafts],
            )  # fmt: skip
        step = Step(target, draft, contiguous(draft_cutoff), contiguous(draft_lse), limits, rows - 1)
        states, flags = empty(2, num_target_rows, dtype=torch.int32).unbind()
        picked = empty(num_target_rows, dtype=torch.int64)
        examined = Examined(states, flags, picked, *empty(6, num_target_rows).unbind())
        outputs = (tokens, num_accepted, status, num_emitted, *(logs if log_probs else (None, None)))
        raced, masses = None, None
        if rule == COUPLED_RULE.value:
            raced = empty(num_target_rows, num_blocks), empty(num_target_rows, num_blocks, dtype=torch.int32)
        table, reduced = sampling.table_ids is not None, d2t is not None
        blocks = padded_blocks(num_blocks)
        sizes = {"RULE": rule, "BLOCKS": blocks, "ROWS": rows_at_once(rows, blocks)}
        sizes["VISITS"] = visits_at_once(blocks, table, reduced)
        visits = empty(batch, 2, blocks, dtype=torch.int32), empty(batch, blocks)
        with device_guard(target_logits):
            find_statistics(target, draft if weigh_draft else NO_ROWS, limits, batch, rows, raced=raced)
            if rule == BLOCK_RULE.value:
                masses = empty(batch, max(rows - 1, 1), num_blocks)
                parts = min(PARTS, triton.cdiv(num_blocks, sizes["VISITS"]))
                sums_kernel[(parts, batch)](
                    step, examined, masses, outputs, **sizes, **options("sums_kernel", device, table or reduced)
                )
            decide_kernel[(batch,)](
                step,
                examined,
                raced,
                masses,
                visits,
                outputs,
                **sizes,
                **options("decide_kernel", device, table or reduced),
            )
    return tokens, num_accepted, status, num_emitted, *logs


ops.implement("speculative_step_triton", speculative_step)
