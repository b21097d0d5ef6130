"""The launch ``race`` of rule ``coupled`` with filters: the race of every block that has a token to keep. Without
filters, ``measure`` runs it."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import let_next_begin, wait_for_earlier
from .draw import race_tokens
from .rows import blocks_of, load_block, load_cutoff, load_limit


@triton.jit(do_not_specialize=["first_row"])
def race_kernel(
    rows,  # Rows
    num_drafts_ptr,  # [B] or None
    num_rows,  # per sequence
    first_row,  # offset of the first row in the step
    raced,  # (scores, winners), out
    FOLDED: tl.constexpr,  # as in ``measure``
    DEPENDENT: tl.constexpr,
):
    """Program (block, sequence, row)."""
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    at, b = tl.program_id(0), tl.program_id(1)
    if FOLDED:
        b, at = at // rows.num_blocks, at % rows.num_blocks
    b, i = b.to(tl.int64), tl.program_id(2)
    if (i <= load_limit(num_drafts_ptr, b, num_rows - 1)) & (tl.load(rows.sampling.temperature_ptr + b) != 0.0):
        j, block = (i + first_row).to(tl.int64), at + tl.arange(0, 1)
        its_max = tl.load(rows.max_ptr + blocks_of(rows, b, j) + block)
        if tl.max(its_max, 0) >= load_cutoff(rows, b, j):
            race_tokens(rows, b, j, block, load_block(rows, b, j, block), its_max, raced, block >= 0)
        else:
            score_ptr, winner_ptr = raced
            tl.store(score_ptr + blocks_of(rows, b, j) + block, tl.zeros([1], tl.float32))
