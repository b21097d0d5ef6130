"""``speculative_step`` in two launches, or in three with filters.

1. Statistics of every block of every row that may be needed.
2. With filters: one program for each of these rows finds its cutoff.
3. Rules ``token`` and ``block``: one program for each (sequence, block) walks over the drafts and weighs its block of
   the residual max(0, w p - q): with ``token`` in the row where the walk ended, with ``block`` in every row on its way.
   All programs of a sequence take the same walk; the last one decides and draws. If the residual turns out to have no
   mass, that program accepts the draft and walks on.
   Rule ``coupled``: one program for each block of a row runs its part of the race; the last one of a sequence compares
   the drafts with the winners.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import ops
from .arrivals import arrives_last
from .core import (
    BLOCK_RULE,
    COUPLED_RULE,
    INFINITY,
    RECOVER_BLOCK,
    RECOVER_TOKEN,
    inverse,
    joint_ratio,
    log_probability,
)
from .draw import draw, race_block
from .filters import filter_kernel
from .launch import (
    contiguous,
    dense_rows,
    device_guard,
    number_of_blocks,
    padded_blocks,
    rows_on_device,
    sampling_on_device,
)
from .rows import NO_ROWS, load_limit, load_merged, load_row, load_token, stats_kernel, stats_row
from .tables import options
from .verify import (
    DONE,
    DRAW,
    RECOVER,
    Step,
    examine,
    recover,
    residual_masses,
    residual_weights,
    walk,
    walk_favourites,
    walk_jointly,
    where_to,
)


@triton.jit
def weigh_passed_rows(step, b, block, mass_ptr, BLOCKS: tl.constexpr):
    """Rule `block`: stores one block's residual mass for every row at which the kept prefix may end."""
    j, w, walking = b * 0, tl.full([], 1.0, tl.float32), True
    while walking:
        fault, flags, drafted, log_p, log_q = examine(step, b, j, BLOCKS)
        if drafted:
            mass = tl.sum(residual_weights(step, b, j, w, block, BLOCKS), 0)
            tl.store(mass_ptr + (b * step.num_drafts + j) * step.target.num_blocks + block, mass)
        walking = drafted & (log_q != -INFINITY)
        w = joint_ratio(w, log_p, log_q)
        j += 1


@triton.jit
def decide(step, b, j, w, state, status, mass_ptr, RULE: tl.constexpr, BLOCKS: tl.constexpr):
    """Rules `token` and `block`, after the walk: (number of accepted drafts, status, token after them or -1).

    ``mass_ptr``: masses of the residual of row j, before which a prefix with joint ratio ``w`` was kept."""
    blocks = tl.arange(0, BLOCKS)
    token = tl.full([], -1, tl.int64)
    num_masses = tl.where(state == RECOVER, step.target.num_blocks, 0)
    mass = tl.load(mass_ptr + blocks, mask=blocks < num_masses, other=0.0)
    while state != DONE:
        if state == RECOVER:
            token = recover(step, b, j, w, mass, BLOCKS)
            state = tl.full([], DONE, tl.int32)
            if token < 0:
                # A residual without mass: p and q are equal up to rounding. The draft is accepted, unless p(x) = 0.
                fault, flags, drafted, log_p, log_q = examine(step, b, j, BLOCKS)
                state = tl.full([], DRAW, tl.int32)
                if tl.exp(log_p) > 0.0:
                    j += 1
                    if RULE == BLOCK_RULE:
                        w = joint_ratio(w, log_p, log_q)
                        fault, status, drafted, log_p, log_q = examine(step, b, j, BLOCKS)
                        state = where_to(fault, drafted)
                    else:
                        j, state, status = walk(step, b, j, status, BLOCKS)
                    if state == RECOVER:
                        mass = residual_masses(step, b, j, w, BLOCKS)
        if state == DRAW:
            token = draw(step.target, b, j, BLOCKS, RECOVER_BLOCK, RECOVER_TOKEN)
            state = tl.full([], DONE, tl.int32)
    return j, status, token


@triton.jit
def store_log_probs(step, b, i, token, log_probs_ptr, raw_log_probs_ptr, BLOCKS: tl.constexpr):
    """Stores the log-probabilities of the token that row i emitted; NaN if it emitted none (-1)."""
    log_p, raw_log_p = tl.full([], float("nan"), tl.float32), tl.full([], float("nan"), tl.float32)
    target = step.target
    if token >= 0:
        temperature = tl.load(target.sampling.temperature_ptr + b)
        logit, raw = load_token(target, b, i, token)
        largest, lse, cutoff, mass, block_max = load_row(target, b, i, BLOCKS)
        log_p = tl.where(temperature == 0.0, 0.0, log_probability(logit, inverse(temperature), lse, cutoff))
        largest, lse, mass, block_max = load_merged(
            target.raw_max_ptr, target.raw_sum_ptr, stats_row(target, b, i) * target.num_blocks, target.num_blocks,
            tl.full([], 1.0, tl.float32), BLOCKS,
        )  # fmt: skip
        raw_log_p = raw - lse
    tl.store(log_probs_ptr + b * (step.num_drafts + 1) + i, log_p)
    tl.store(raw_log_probs_ptr + b * (step.num_drafts + 1) + i, raw_log_p)


@triton.jit
def emit(step, b, j, status, token, outputs, BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    """Stores what a sequence emits: its first ``j`` drafts, then ``token`` unless that is -1."""
    tokens_ptr, num_accepted_ptr, status_ptr, num_emitted_ptr, log_probs_ptr, raw_log_probs_ptr = outputs
    row, num_rows = tl.arange(0, ROWS), step.num_drafts + 1
    drafts = tl.load(step.target.sampling.drafts_ptr + b * step.num_drafts + row, mask=row < j, other=-1)
    emitted = tl.where(row == j, token, drafts)
    tl.store(tokens_ptr + b * num_rows + row, emitted, mask=row < num_rows)
    tl.store(num_accepted_ptr + b, j)
    tl.store(status_ptr + b, status)
    tl.store(num_emitted_ptr + b, j + tl.where(token >= 0, 1, 0))
    if log_probs_ptr is not None:
        for i in range(0, num_rows):
            its_token = tl.sum(tl.where(row == i, emitted, 0), 0)
            store_log_probs(step, b, tl.cast(i, tl.int64), its_token, log_probs_ptr, raw_log_probs_ptr, BLOCKS)


@triton.jit
def residual_kernel(
    step,  # Step
    mass_ptr,  # scratch: residual mass of every block, [B, blocks]; with rule `block` [B, K, blocks]
    arrivals_ptr,  # [B], 0
    outputs,  # tokens [B, K+1]; num_accepted, status, num_emitted: [B]; log_probs and raw ones [B, K+1], or None
    RULE: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,  # K + 1 or more, a power of 2
):
    at, num_blocks = tl.program_id(0).to(tl.int64), step.target.num_blocks
    b, block = at // num_blocks, at % num_blocks
    greedy = tl.load(step.target.sampling.temperature_ptr + b) == 0.0
    j, w = b * 0, tl.full([], 1.0, tl.float32)
    state, status = tl.full([], DONE, tl.int32), tl.full([], 0, tl.int32)
    if not greedy:
        if RULE == BLOCK_RULE:
            weigh_passed_rows(step, b, block, mass_ptr, BLOCKS)
        else:
            j, state, status = walk(step, b, j, status, BLOCKS)
            if state == RECOVER:
                tl.store(mass_ptr + at, tl.sum(residual_weights(step, b, j, w, block, BLOCKS), 0))
    if arrives_last(arrivals_ptr, b, num_blocks):
        if greedy:
            j, status, token = walk_favourites(step, b, None, None, RULE, BLOCKS)
        else:
            mass_row = b
            if RULE == BLOCK_RULE:
                j, state, status, w = walk_jointly(step, b, mass_ptr, BLOCKS)
                mass_row = b * step.num_drafts + j
            j, status, token = decide(step, b, j, w, state, status, mass_ptr + mass_row * num_blocks, RULE, BLOCKS)
        emit(step, b, j, status, token, outputs, BLOCKS, ROWS)


@triton.jit
def race_kernel(
    step,  # Step
    score_ptr,  # [B, K+1, blocks] scratch
    winner_ptr,
    arrivals_ptr,  # [B], 0
    outputs,  # as in ``residual_kernel``
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    at, num_blocks, num_rows = tl.program_id(0).to(tl.int64), step.target.num_blocks, step.num_drafts + 1
    row, block = at // num_blocks, at % num_blocks
    b, j = row // num_rows, row % num_rows
    greedy = tl.load(step.target.sampling.temperature_ptr + b) == 0.0
    if (j <= load_limit(step.num_drafts_ptr, b, step.num_drafts)) & (not greedy):
        race_block(step.target, b, j, block, score_ptr, winner_ptr)
    if arrives_last(arrivals_ptr, b, num_rows * num_blocks):
        j, status, token = walk_favourites(step, b, score_ptr, winner_ptr, COUPLED_RULE, BLOCKS)
        emit(step, b, j, status, token, outputs, BLOCKS, ROWS)


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
        cutoff = None if sampling.filters is None else empty(num_target_rows + num_draft_rows)
        logits = dense_rows(target_logits)
        target = rows_on_device(
            logits, (logits.stride(0), logits.stride(1)), vocabulary, None, on_device, (rows, 1),
            (block_max[:num_target_rows], block_sum[:num_target_rows]), (raw_max, raw_sum), cutoff, allowed,
        )  # fmt: skip
        draft = NO_ROWS
        if full_q:
            logits = dense_rows(draft_logits)
            draft = rows_on_device(
                logits, (logits.stride(0), logits.stride(1)), vocabulary, contiguous(d2t), on_device, (rows - 1, 1),
                (block_max[num_target_rows:], block_sum[num_target_rows:]) if weigh_draft else (None, None),
                cutoff=cutoff[num_target_rows:] if weigh_draft and cutoff is not None else None,
                allowed=None if allowed is None or masked_drafts == 0 else allowed[:, :masked_drafts],
            )  # fmt: skip
        step = Step(target, draft, contiguous(draft_cutoff), contiguous(draft_lse), limits, rows - 1)
        both = (target, draft if weigh_draft else NO_ROWS, limits, batch, rows, 0)
        arrivals = empty(batch, dtype=torch.int32)
        outputs = (tokens, num_accepted, status, num_emitted, *(logs if log_probs else (None, None)))
        table = sampling.table_ids is not None
        sizes = {"BLOCKS": padded_blocks(num_blocks), "ROWS": triton.next_power_of_2(rows)}
        with device_guard(target_logits):
            stats_kernel[((num_target_rows + num_draft_rows) * num_blocks,)](
                *both, arrivals, **options("stats_kernel", device, table)
            )
            if sampling.filters is not None:
                filter_kernel[(num_target_rows + num_draft_rows,)](
                    *both, BLOCKS=sizes["BLOCKS"], **options("filter_kernel", device, table)
                )
            if rule == COUPLED_RULE.value:
                scores = empty(num_target_rows, num_blocks)
                winners = empty(num_target_rows, num_blocks, dtype=torch.int64)
                race_kernel[(num_target_rows * num_blocks,)](
                    step, scores, winners, arrivals, outputs, **sizes, **options("race_kernel", device, table)
                )
            else:
                masses = empty(batch, rows - 1 if rule == BLOCK_RULE.value else 1, num_blocks)
                residual_kernel[(batch * num_blocks,)](
                    step, masses, arrivals, outputs, RULE=rule, **sizes, **options("residual_kernel", device, table)
                )
    return tokens, num_accepted, status, num_emitted, *logs


ops.implement("speculative_step_triton", speculative_step)
