"""``speculative_step`` in three launches, or in four with filters.

1. Statistics of every block of every row that may be needed.
2. With filters: one program for each of these rows finds its cutoff.
3. Rules ``token`` and ``block``: one program for each (sequence, row) examines the row: its draft's test, and what of
   p and q it takes to weigh the residual max(0, w p - q).
4. One program for each (sequence, block) walks over what was found out, and weighs its block of the residual: with
   ``token`` in the row where the walk ends, with ``block`` in every row on its way. The last one of a sequence decides
   and draws. If the residual turns out to have no mass, that program accepts the draft and walks on. Where there is
   nothing to weigh, as in greedy sequences, one program emits at once.

   Rule ``coupled``: first one program for each block of a row runs its part of the race, then one program for each row
   examines whether the draft won it. The last one of a sequence walks and emits.
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
    RECOVER_BLOCK,
    RECOVER_TOKEN,
    accept_noise,
    joint_ratio,
    keep_probability,
)
from .draw import draw, race_block
from .emit import emit, store_log_probs
from .examined import (
    DONE,
    DRAW,
    RECOVER,
    Examined,
    examine,
    load_ending,
    load_statistics,
    load_tested,
    walk,
)
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
from .rows import NO_ROWS, load_limit, stats_kernel
from .tables import options
from .verify import Step, recover, residual_masses, residual_weights

# With rule `block`, a program weighs its block of one row after another. Rows are shared among programs as long as
# there are no more programs than this, about as many as a large GPU runs at a time.
PROGRAMS = 1024


@triton.jit
def race_kernel(
    step,  # Step
    score_ptr,  # [B, K+1, blocks] scratch
    winner_ptr,
):
    at, num_blocks, num_rows = tl.program_id(0), step.target.num_blocks, step.num_drafts + 1
    row, block = at // num_blocks, (at % num_blocks).to(tl.int64)
    b, j = (row // num_rows).to(tl.int64), (row % num_rows).to(tl.int64)
    greedy = tl.load(step.target.sampling.temperature_ptr + b) == 0.0
    if (j <= load_limit(step.num_drafts_ptr, b, step.num_drafts)) & (not greedy):
        race_block(step.target, b, j, block, score_ptr, winner_ptr)


@triton.jit
def examine_kernel(
    step,  # Step
    examined,  # Examined, out
    score_ptr,  # [B, K+1, blocks] of ``race_kernel`` with rule `coupled`, else None
    winner_ptr,
    arrivals_ptr,  # [B], 0, with rule `coupled`, else None
    outputs,  # tokens [B, K+1]; num_accepted, status, num_emitted: [B]; log_probs and raw ones [B, K+1], or None
    RULE: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,  # K + 1 or more, a power of 2
):
    at, num_rows = tl.program_id(0), step.num_drafts + 1
    b, j = (at // num_rows).to(tl.int64), (at % num_rows).to(tl.int64)
    limit = load_limit(step.num_drafts_ptr, b, step.num_drafts)
    if j <= limit:
        token = examine(step, examined, b, j, score_ptr, winner_ptr, RULE, BLOCKS)
        store_log_probs(step, b, j, token, outputs, BLOCKS)
        if RULE == COUPLED_RULE:
            if arrives_last(arrivals_ptr, b, limit + 1):
                j, state = walk(step, examined, b, b * 0, ROWS)
                state, status, token = load_ending(step, examined, b, j)
                emit(step, b, j, status, token, outputs, BLOCKS, ROWS)


@triton.jit
def weigh_rows(step, examined, b, part, parts, block, num_weighed, mass_ptr):
    """Rule `block`: stores one block's residual mass of every ``parts``-th row from row ``part`` on, of the first
    ``num_weighed`` rows, at which the kept prefix may end."""
    j, its_row, w = b * 0, part, tl.full([], 1.0, tl.float32)
    while j < num_weighed:
        if j == its_row:
            p_lse, p_cutoff, q_lse, q_cutoff = load_statistics(step, examined, b, j)
            weights = residual_weights(step, b, j, w, block, p_lse, p_cutoff, q_lse, q_cutoff)
            tl.store(mass_ptr + (b * step.num_drafts + j) * step.target.num_blocks + block, tl.sum(weights, 0))
            its_row += parts
        log_p, log_q = load_tested(step, examined, b, j)
        w = joint_ratio(w, log_p, log_q)
        j += 1


@triton.jit
def walk_jointly(step, examined, b, end, mass_ptr, BLOCKS: tl.constexpr):
    """Rule `block`: finds the longest prefix of the drafts of rows 0 .. end - 1 that passes its test. Returns (the row
    after it, its joint ratio)."""
    seed, position = tl.load(step.target.sampling.seed_ptr + b), tl.load(step.target.sampling.position_ptr + b)
    blocks = tl.arange(0, BLOCKS)
    j, w = b * 0, tl.full([], 1.0, tl.float32)
    kept, kept_w = b * 0, tl.full([], 1.0, tl.float32)
    while j <= end:
        state, flags, picked = load_ending(step, examined, b, j)
        keep = w
        if state == RECOVER:
            at = (b * step.num_drafts + j) * step.target.num_blocks
            mass = tl.load(mass_ptr + at + blocks, mask=blocks < step.target.num_blocks, other=0.0)
            keep = keep_probability(w, tl.sum(mass, 0))
        # The prefix of j drafts is tested with the noise of its last draft; the empty prefix always passes.
        passed = (j == 0) | (accept_noise(seed, position, j - 1) < keep)
        kept, kept_w = tl.where(passed, j, kept), tl.where(passed, w, kept_w)
        log_p, log_q = load_tested(step, examined, b, j)
        w = joint_ratio(w, log_p, log_q)
        j += 1
    return kept, kept_w


@triton.jit
def decide(step, examined, b, j, w, mass_ptr, RULE: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    """Rules `token` and `block`, after the walk: (number of accepted drafts, status, token after them or -1).

    ``mass_ptr``: masses of the residual of row j, before which a prefix with joint ratio ``w`` was kept."""
    state, status, token = load_ending(step, examined, b, j)
    blocks = tl.arange(0, BLOCKS)
    num_masses = tl.where(state == RECOVER, step.target.num_blocks, 0)
    mass = tl.load(mass_ptr + blocks, mask=blocks < num_masses, other=0.0)
    while state != DONE:
        if state == RECOVER:
            p_lse, p_cutoff, q_lse, q_cutoff = load_statistics(step, examined, b, j)
            token = recover(step, b, j, w, mass, p_lse, p_cutoff, q_lse, q_cutoff, BLOCKS)
            state = tl.full([], DONE, tl.int32)
            if token < 0:
                # A residual without mass: p and q are equal up to rounding. The draft is accepted, unless p(x) = 0.
                state = tl.full([], DRAW, tl.int32)
                log_p, log_q = load_tested(step, examined, b, j)
                if tl.exp(log_p) > 0.0:
                    j += 1
                    if RULE == BLOCK_RULE:
                        w = joint_ratio(w, log_p, log_q)
                    else:
                        j, state = walk(step, examined, b, j, ROWS)
                    state, status, picked = load_ending(step, examined, b, j)
                    if state == RECOVER:
                        p_lse, p_cutoff, q_lse, q_cutoff = load_statistics(step, examined, b, j)
                        mass = residual_masses(step, b, j, w, p_lse, p_cutoff, q_lse, q_cutoff, BLOCKS)
        if state == DRAW:
            token = draw(step.target, b, j, BLOCKS, RECOVER_BLOCK, RECOVER_TOKEN)
            state = tl.full([], DONE, tl.int32)
    return j, status, token


@triton.jit(do_not_specialize=["parts"])
def residual_kernel(
    step,  # Step
    examined,  # Examined
    mass_ptr,  # scratch: residual mass of every block, [B, blocks]; with rule `block` [B, K, blocks]
    parts,  # programs that share the rows of a block with rule `block`; else 1
    arrivals_ptr,  # [B], 0
    outputs,  # as in ``examine_kernel``
    RULE: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    at, num_blocks = tl.program_id(0), step.target.num_blocks
    row, block = at // num_blocks, (at % num_blocks).to(tl.int64)
    b, part = (row // parts).to(tl.int64), row % parts
    temperature = tl.load(step.target.sampling.temperature_ptr + b)
    j, state = walk(step, examined, b, b * 0, ROWS)
    num_weighed = tl.where(state == RECOVER, 1, 0)
    if RULE == BLOCK_RULE:
        num_weighed = tl.where(temperature == 0.0, 0, j.to(tl.int32) + num_weighed)
    decides = (part == 0) & (block == 0) & (num_weighed == 0)  # if nothing is weighed, there is no need to wait
    w, mass_row = tl.full([], 1.0, tl.float32), b
    if part < num_weighed:
        if RULE == BLOCK_RULE:
            weigh_rows(step, examined, b, part, parts, block, num_weighed, mass_ptr)
        else:
            p_lse, p_cutoff, q_lse, q_cutoff = load_statistics(step, examined, b, j)
            weights = residual_weights(step, b, j, w, block, p_lse, p_cutoff, q_lse, q_cutoff)
            tl.store(mass_ptr + at, tl.sum(weights, 0))
        decides = arrives_last(arrivals_ptr, b, tl.minimum(num_weighed, parts) * num_blocks)
    if decides:
        if RULE == BLOCK_RULE:
            if num_weighed > 0:
                j, w = walk_jointly(step, examined, b, j, mass_ptr, BLOCKS)
            mass_row = b * step.num_drafts + j
        j, status, token = decide(step, examined, b, j, w, mass_ptr + mass_row * num_blocks, RULE, BLOCKS, ROWS)
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
        states, flags = empty(2, num_target_rows, dtype=torch.int32).unbind()
        picked = empty(num_target_rows, dtype=torch.int64)
        examined = Examined(states, flags, picked, *empty(6, num_target_rows).unbind())
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
            coupled = rule == COUPLED_RULE.value
            scores, winners = None, None
            if coupled:
                scores = empty(num_target_rows, num_blocks)
                winners = empty(num_target_rows, num_blocks, dtype=torch.int64)
                race_kernel[(num_target_rows * num_blocks,)](
                    step, scores, winners, **options("race_kernel", device, table)
                )
            examine_kernel[(num_target_rows,)](
                step, examined, scores, winners, arrivals if coupled else None, outputs, RULE=rule, **sizes,
                **options("examine_kernel", device, table),
            )  # fmt: skip
            if not coupled:
                num_weighed = max(rows - 1, 1) if rule == BLOCK_RULE.value else 1
                parts = min(num_weighed, max(1, PROGRAMS // (batch * num_blocks)))
                masses = empty(batch, num_weighed, num_blocks)
                residual_kernel[(batch * parts * num_blocks,)](
                    step, examined, masses, parts, arrivals, outputs, RULE=rule, **sizes,
                    **options("residual_kernel", device, table),
                )  # fmt: skip
    return tokens, num_accepted, status, num_emitted, *logs


ops.implement("speculative_step_triton", speculative_step)
