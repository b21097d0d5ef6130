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
from .kinds import FirstCall
from .launch import (
    NO_STATISTICS,
    Given,
    arguments_of,
    launch,
    masks_of,
    number_of_blocks,
    padded_blocks,
    pitch_of,
    races_of,
    rows_on_device,
    statistics_of,
)
from .rows import NO_ROWS
from .stages import find_statistics
from .sums import sums_kernel
from .tables import rows_at_once, visits_at_once
from .verify import Step
from .walk import Examined

PARTS = 16  # programs that share the blocks of a sequence's residuals, with rule `block`


def speculative_step(
    target_logits, draft_tokens, draft_logits, draft_cutoff, draft_lse, d2t, num_drafts, sampling, allowed,
    masked_drafts, seed, position, rule, log_probs,
):  # fmt: skip
    (batch, rows, _), device = target_logits.shape, target_logits.device
    tokens = torch.empty(batch, rows, dtype=torch.int64, device=device)
    counts = torch.empty(batch, dtype=torch.int32, device=device)
    logs = torch.empty(batch, rows if log_probs else 0, dtype=torch.float32, device=device)
    results = (tokens, counts, torch.empty_like(counts), torch.empty_like(counts), logs, torch.empty_like(logs))
    if batch == 0:
        return results
    if rows == 1:
        draft_logits = d2t = None
    given = Given(
        ops.SamplingTensors(*sampling), seed, position, draft_tokens, None,
        (d2t, draft_cutoff, draft_lse, num_drafts), (target_logits, draft_logits, allowed), results,
    )  # fmt: skip
    form = "speculative_step", rule, masked_drafts, log_probs
    launch(form, given, lambda call: first_step(call, rule, masked_drafts, log_probs))
    return results


def first_step(call: FirstCall, rule: int, masked_drafts: int, log_probs: bool) -> None:
    sampling, (ids, cutoff, lse, limits, p, q, allowed, *outputs) = arguments_of(call)
    batch, rows, vocabulary = p.shape
    num_rows, num_drafts, num_blocks = batch * rows, rows - 1, number_of_blocks(vocabulary)
    blocks, weigh_draft = padded_blocks(num_blocks), q is not None and lse is None

    def raw() -> torch.Tensor | None:
        return call.allocate(torch.float32, num_rows, pitch_of(num_blocks)) if log_probs else None

    target = rows_on_device(
        p, p.stride()[:2], vocabulary, num_blocks, None, sampling, (rows, 1),
        statistics_of(call, num_rows, num_blocks, sampling), (raw(), raw()), masks_of(allowed, rows),
    )  # fmt: skip
    draft = NO_ROWS
    if q is not None:
        draft = rows_on_device(
            q, q.stride()[:2], q.shape[2], num_blocks, ids, sampling, (num_drafts, 1),
            statistics_of(call, batch * num_drafts, num_blocks, sampling) if weigh_draft else NO_STATISTICS,
            masks=masks_of(allowed, masked_drafts),
        )  # fmt: skip
    step = Step(target, draft, cutoff, lse, limits, num_drafts)
    dtypes = (torch.int32, torch.int32, torch.int64, *[torch.float32] * 6)
    raw_lse = call.allocate(torch.float32, num_rows) if log_probs else None
    examined = Examined._make([*(call.allocate(dtype, num_rows) for dtype in dtypes), raw_lse])
    raced = races_of(call, num_rows, num_blocks) if rule == COUPLED_RULE.value else None
    masses = None
    if rule == BLOCK_RULE.value:
        masses = call.allocate(torch.float32, batch, max(num_drafts, 1), num_blocks)
    visits = call.allocate(torch.int32, batch, 2, blocks), call.allocate(torch.float32, batch, blocks)
    results = tuple(outputs) if log_probs else (*outputs[:4], None, None)
    table, reduced = sampling.ids_ptr is not None, ids is not None
    sizes = {"RULE": rule, "BLOCKS": blocks, "ROWS": rows_at_once(rows, blocks)}
    sizes["VISITS"] = visits_at_once(blocks, table, reduced or allowed is not None)
    find_statistics(call, target, draft if weigh_draft else NO_ROWS, limits, batch, rows, raced=raced)
    if masses is not None:
        parts = min(PARTS, -(-num_blocks // sizes["VISITS"]))
        call.launch(sums_kernel, (parts, batch, 1), step, examined, masses, results, table=table or reduced, **sizes)
    call.launch(
        decide_kernel, (batch, 1, 1), step, examined, raced, masses, visits, results, table=table or reduced, **sizes
    )


ops.implement("speculative_step_triton", speculative_step)
