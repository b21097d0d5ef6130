"""The launches that all operations begin with: ``measure``, and with filters ``select`` and ``select_flat`` and, for
rules ``coupled`` and ``walk``, ``race``."""

from __future__ import annotations

from typing import Any, cast

from .kinds import FirstCall
from .launch import padded_blocks
from .measure import measure_kernel
from .race import race_kernel
from .rows import NO_ROWS, Rows, Sampling
from .select import select_kernel
from .select_flat import select_flat_kernel
from .tables import blocks_of_a_program, parts_at_once

MOST_SEQUENCES = 65535  # along the second dimension of a grid


def grid_of(parts: int, batch: int, rows: int) -> tuple[tuple[int, int, int], bool]:
    """(a grid, whether its first dimension is that of parts and sequences)."""
    folded = batch > MOST_SEQUENCES
    return ((parts * batch, 1, rows) if folded else (parts, batch, rows)), folded


def find_statistics(
    call: FirstCall,
    target: Rows,
    draft: Rows,
    limits: Any,
    batch: int,
    rows: int,
    first_row: int = 0,
    raced: tuple[Any, Any] | None = None,
) -> None:
    """Launches what finds the statistics of ``rows`` rows of p, or of whatever ``target`` is, for each sequence, from
    row ``first_row`` on, and of one row of ``draft`` less; with ``raced``, and the race of rule ``coupled``.
    """
    num_blocks, sampling = target.num_blocks, cast(Sampling, target.sampling)
    table, filtered = sampling.ids_ptr is not None, target.cutoff_ptr is not None
    all_rows = rows if draft is NO_ROWS else 2 * rows - 1
    inside = raced is not None and not filtered
    many = table or inside or target.allowed_ptr is not None  # of what a token needs beside its logit
    # Each of these takes registers of as many blocks again.
    more = filtered + (target.raw_max_ptr is not None) + (target.ptr.element_size() > 2)
    size = 1 if many else blocks_of_a_program(num_blocks * batch * all_rows, more)
    grid, folded = grid_of(-(-num_blocks // size), batch, all_rows)
    call.launch(
        measure_kernel, grid, target, draft, limits, rows, first_row, raced if inside else None, N=size, FOLDED=folded,
        table=many,
    )  # fmt: skip
    if filtered:
        for kernel in (select_kernel, select_flat_kernel):
            call.launch(
                kernel, (batch, all_rows, 1), target, draft, limits, rows, first_row, BLOCKS=padded_blocks(num_blocks),
                TILE=parts_at_once(kernel.__name__, table), table=table,
            )  # fmt: skip
        if raced is not None:
            grid, folded = grid_of(num_blocks, batch, rows)
            call.launch(race_kernel, grid, target, limits, rows, first_row, raced, FOLDED=folded, table=table)
