"""The launch ``decide`` of a step: one program for each sequence walks over its drafts, draws a token, and emits."""

from __future__ import annotations

import triton
import triton.language as tl

from .core import BLOCK_RULE, COUPLED_RULE, joint_ratio
from .dependent import wait_for_earlier
from .emit import emit
from .recover import best_residual, race_blocks
from .sums import walk_jointly
from .verify import draw_in_block
from .walk import DRAW, RECOVER, WALKING, examine, load_ending, load_statistics, load_tested


@triton.jit
def decide_kernel(
    step,  # Step
    examined,  # Examined: scratch; with rule `block`, of ``sums``
    raced,  # (scores, winners) of rule `coupled`, [B, K+1, blocks] each; else None
    mass_ptr,  # [B, K, blocks] of ``sums`` with rule `block`; else None
    visits,  # scratch of ``race_blocks``: int32 [B, 2, BLOCKS] and float32 [B, BLOCKS]
    outputs,  # tokens [B, K+1]; num_accepted, status, num_emitted: [B]; log_probs and raw ones [B, K+1], or None
    RULE: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,  # that are examined at once, a power of 2
    VISITS: tl.constexpr,  # blocks that are weighed at once
    DEPENDENT: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    zero = tl.program_id(2)  # which compilers do not know, so that they make no second copy for the loop's beginning
    j, w, state = b * 0 + zero, tl.full([], 1.0, tl.float32), tl.full([], WALKING, tl.int32)
    status, token, walking = tl.full([], 0, tl.int32), tl.full([], -1, tl.int64), zero == 0
    block = tl.full([], 0, tl.int32)
    if RULE == BLOCK_RULE:
        wait_for_earlier(DEPENDENT)
        j, w = walk_jointly(step, examined, b, mass_ptr, BLOCKS)
    while walking:
        if RULE != BLOCK_RULE:
            j, state = examine(step, examined, b, j, raced, outputs, RULE, BLOCKS, ROWS, VISITS, DEPENDENT)
        walking = state == WALKING
        if RULE == BLOCK_RULE or not walking:
            state, status, token = load_ending(step, examined, b, j)
            walking = False
            if RULE != COUPLED_RULE and state >= DRAW:  # else, as with greedy sequences, the token is known
                p_lse, p_cutoff, q_lse, q_cutoff = load_statistics(step, examined, b, j)
                block = race_blocks(step, b, j, w, p_lse, visits, BLOCKS)
                if state == RECOVER:
                    found, mass, left = best_residual(
                        step, b, j, w, p_lse, p_cutoff, q_lse, q_cutoff, visits, False, None, None, BLOCKS, VISITS
                    )
                    if found >= 0:
                        block = found
                    else:
                        # No mass: p and q are equal up to rounding. The draft is accepted, unless p(x) = 0.
                        log_p, log_q = load_tested(step, examined, b, j)
                        walking = tl.exp(log_p) > 0.0
                        if RULE == BLOCK_RULE:
                            w = tl.where(walking, joint_ratio(w, log_p, log_q), w)
                        j, state = tl.where(walking, j + 1, j), tl.full([], DRAW, tl.int32)
    if RULE != COUPLED_RULE and state >= DRAW:
        p_lse, p_cutoff, q_lse, q_cutoff = load_statistics(step, examined, b, j)
        token = draw_in_block(step, b, j, w, block, state == RECOVER, p_lse, p_cutoff, q_lse, q_cutoff)
    emit(step, examined, b, j, status, token, outputs, ROWS)
