"""``speculative_step`` in two launches: ``measure`` finds the statistics of every block of logits, ``decide`` does the
rest, one program for each sequence.

With filters, ``select`` comes between them, which finds the cutoff of every row; with rule ``block``, ``sums``, which
examines the rows in place of ``decide`` and weighs the residuals that its decision depends on; with filters and rule
``coupled``, ``race``.
"""

from __future__ import annotations

import torch

from ... import ops
from .core import BLOCK_RULE, COUPLED_RULE
from .decide import decide_kernel
from .kinds import Piece, Scratch, kind_of
from .launch import (
    NO_MASKS,
    NO_STATISTICS,
    Given,
    contiguous,
    dense_rows,
    device_guard,
    masks_of,
    number_of_blocks,
    padded_blocks,
    pieces_of_statistics,
    pitch_of,
    rows_on_device,
)
from .rows import NO_ROWS
from .stages import find_statistics
from .sums import sums_kernel
from .tables import rows_at_once, visits_at_once
from .verify import Step
from .walk import Examined

PARTS = 16  # programs that share the blocks of a sequence's residuals, with rule `block`


def scratch_of(
    batch: int, rows: int, num_blocks: int, weigh_draft: bool, filtered: bool, log_probs: bool, rule: int, blocks: int
) -> Scratch:
    """In this order: statistics of the target's rows, of the draft's, raw ones; ``Examined``; races, masses, visits."""
    num_rows, num_draft_rows = batch * rows, batch * (rows - 1)

    def floats(*shape: int) -> Piece:
        return torch.float32, shape

    def integers(*shape: int) -> Piece:
        return torch.int32, shape

    pitch = pitch_of(num_blocks)
    raw: Piece = floats(num_rows, pitch) if log_probs else None
    coupled, block = rule == COUPLED_RULE.value, rule == BLOCK_RULE.value
    return Scratch(
        *pieces_of_statistics(num_rows, num_blocks, filtered),
        *(pieces_of_statistics(num_draft_rows, num_blocks, filtered) if weigh_draft else NO_STATISTICS),
        raw, raw,
        integers(num_rows), integers(num_rows), (torch.int64, (num_rows,)), *[floats(num_rows)] * 6,
        floats(num_rows) if log_probs else None,
        floats(num_rows, pitch) if coupled else None, integers(num_rows, pitch) if coupled else None,
        floats(batch, max(rows - 1, 1), num_blocks) if block else None,
        integers(batch, 2, blocks), floats(batch, blocks),
    )  # fmt: skip


def speculative_step(
    target_logits, draft_tokens, draft_logits, draft_cutoff, draft_lse, d2t, num_drafts, sampling, allowed,
    masked_drafts, seed, position, rule, log_probs,
):  # fmt: skip
    sampling, (batch, rows, vocabulary) = ops.SamplingTensors(*sampling), target_logits.shape
    device, num_blocks = target_logits.device, number_of_blocks(vocabulary)

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    columns = rows if log_probs else 0
    results = (
        empty(torch.int64, batch, rows), empty(torch.int32, batch), empty(torch.int32, batch),
        empty(torch.int32, batch), empty(torch.float32, batch, columns), empty(torch.float32, batch, columns),
    )  # fmt: skip
    if batch == 0:
        return results
    full_q = draft_logits is not None and rows > 1
    weigh_draft = full_q and draft_lse is None
    target_logits = dense_rows(target_logits)
    draft_logits = dense_rows(draft_logits) if full_q else None
    allowed = None if allowed is None else dense_rows(allowed)
    given = Given(
        sampling, seed, position, draft_tokens, None,
        (target_logits, draft_logits, contiguous(d2t) if full_q else None, contiguous(draft_cutoff),
         contiguous(draft_lse), contiguous(num_drafts), allowed),
        results,
    )  # fmt: skip
    strides, draft_strides = target_logits.stride(), draft_logits.stride() if full_q else None
    form = (
        "speculative_step", rule, masked_drafts, log_probs, given.forms, strides, draft_strides,
        None if allowed is None else allowed.stride(),
    )  # fmt: skip
    filtered, blocks = sampling.filters is not None, padded_blocks(num_blocks)
    kind = kind_of(
        form, device, lambda: scratch_of(batch, rows, num_blocks, weigh_draft, filtered, log_probs, rule, blocks)
    )
    memory, scratch = kind.allocate()
    on_device, (p, q, ids, cutoff, lse, limits, bits, *outputs) = given.pointers(kind)
    target_masks = draft_masks = NO_MASKS
    if allowed is not None:
        target_masks = masks_of(bits, allowed, allowed.stride(1), rows)
        draft_masks = masks_of(bits, allowed, allowed.stride(1), masked_drafts)
    target = rows_on_device(
        p, strides[:2], vocabulary, num_blocks, None, on_device, (rows, 1), scratch[:5], scratch[10:12], target_masks
    )
    draft = NO_ROWS
    if draft_strides is not None:
        draft = rows_on_device(
            q, draft_strides[:2], draft_logits.shape[2], num_blocks, ids, on_device, (rows - 1, 1), scratch[5:10],
            masks=draft_masks,
        )  # fmt: skip
    step = Step(target, draft, cutoff, lse, limits, rows - 1)
    examined = Examined(*scratch[12:22])
    score, winner, masses, visited, weights = scratch[22:]
    raced = None if score is None else (score, winner)
    if not log_probs:
        outputs[4:] = (None, None)
    its_outputs = tuple(outputs)
    table, reduced = sampling.table_ids is not None, d2t is not None
    sizes = {"RULE": rule, "BLOCKS": blocks, "ROWS": rows_at_once(rows, blocks)}
    sizes["VISITS"] = visits_at_once(blocks, table, reduced)
    with device_guard(target_logits):
        find_statistics(kind, target, draft if weigh_draft else NO_ROWS, limits, batch, rows, raced=raced)
        if masses is not None:
            parts = min(PARTS, -(-num_blocks // sizes["VISITS"]))
            kind.launch(
                sums_kernel, (parts, batch, 1), step, examined, masses, its_outputs, table=table or reduced, **sizes
            )
        kind.launch(
            decide_kernel, (batch, 1, 1), step, examined, raced, masses, (visited, weights), its_outputs,
            table=table or reduced, **sizes,
        )  # fmt: skip
    kind.ended(memory)
    return results


ops.implement("speculative_step_triton", speculative_step)
