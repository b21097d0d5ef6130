"""``place_rows`` and ``advance_rows``: a launch each, with one program for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import ops
from .launch import device_guard


@triton.jit(do_not_specialize=["num_drafts", "trash"])
def place_rows_kernel(
    known_ptr,  # [n] int64, as room and wanted
    room_ptr,
    wanted_ptr,
    num_drafts,
    trash,
    lengths_ptr,  # [n] int64 out
    positions_ptr,  # [n, num_drafts + 2] int64 out, as the slots
    slots_ptr,
    allowed_ptr,  # [n] int64 out
    live_ptr,  # [n] bool out
    COLUMNS: tl.constexpr,  # num_drafts + 2 or more, a power of 2
):
    b = tl.program_id(0).to(tl.int64)
    known, room = tl.load(known_ptr + b), tl.load(room_ptr + b)
    live = room > 0
    allowed = tl.minimum(tl.minimum(tl.load(wanted_ptr + b), room - 1), num_drafts)
    allowed = tl.maximum(allowed, 0)
    columns = tl.arange(0, COLUMNS)
    places = known + columns - 2
    counts = (columns - 2 < allowed) & (places >= 0) & live
    at, inside = b * (num_drafts + 2) + columns, columns < num_drafts + 2
    tl.store(positions_ptr + at, tl.where(counts, places, 0), mask=inside)
    tl.store(slots_ptr + at, tl.where(counts, places, trash), mask=inside)
    tl.store(lengths_ptr + b, tl.maximum(known - 1, 0))
    tl.store(allowed_ptr + b, allowed)
    tl.store(live_ptr + b, live)


@triton.jit(do_not_specialize=["pitch", "num_ends", "width", "faults"])
def advance_rows_kernel(
    state_ptr,  # [5 + num_ends, n] int64, whose rows are ``pitch`` apart; written
    pitch,
    num_ends,
    tokens_ptr,  # [n, width] int64
    width,
    num_emitted_ptr,  # [n] int32, as the status
    status_ptr,
    faults,
    count_ptr,  # [n] int64 out
    COLUMNS: tl.constexpr,  # width or more, a power of 2
):
    b = tl.program_id(0).to(tl.int64)
    mine = state_ptr + b
    known, room = tl.load(mine), tl.load(mine + pitch)
    columns, emitted = tl.arange(0, COLUMNS), tl.load(num_emitted_ptr + b)
    tokens = tl.load(tokens_ptr + b * width + columns, mask=columns < width, other=-1)
    first = room * 0 + width  # the place of the first token that ends the sequence
    for e in range(num_ends):
        is_end = (tokens == tl.load(mine + (5 + e) * pitch)) & (columns < emitted)
        first = tl.minimum(first, tl.min(tl.where(is_end, columns, width), 0))
    count = tl.where(room > 0, tl.minimum(emitted.to(tl.int64), first + 1), 0)
    failed = (tl.load(status_ptr + b) & faults) != 0
    before, last = tl.load(mine + 3 * pitch), tl.load(mine + 4 * pitch)
    # Of the last two known tokens and the emitted ones, those at ``count`` and ``count`` + 1 are the last two now.
    newest = tl.sum(tl.where(columns == count - 1, tokens, 0), 0)
    second = tl.sum(tl.where(columns == count - 2, tokens, 0), 0)
    tl.store(mine, known + count)
    tl.store(mine + pitch, tl.where((first < width) | failed, 0, room - count))
    tl.store(mine + 3 * pitch, tl.where(count == 0, before, tl.where(count == 1, last, second)))
    tl.store(mine + 4 * pitch, tl.where(count == 0, last, newest))
    tl.store(count_ptr + b, count)


def place_rows(known, room, wanted, num_drafts, trash):
    rows, columns = known.shape[0], num_drafts + 2
    lengths, allowed = (torch.empty(rows, dtype=torch.int64, device=known.device) for _ in range(2))
    positions, slots = (torch.empty(rows, columns, dtype=torch.int64, device=known.device) for _ in range(2))
    live = torch.empty(rows, dtype=torch.bool, device=known.device)
    results = lengths, positions, slots, allowed, live
    with device_guard(known):
        place_rows_kernel[(rows,)](
            known.contiguous(), room.contiguous(), wanted.contiguous(), num_drafts, trash, *results,
            COLUMNS=triton.next_power_of_2(columns), num_warps=1,
        )  # fmt: skip
    return results


def advance_rows(state, tokens, num_emitted, status, faults):
    count, width = state.new_empty(state.shape[1]), tokens.shape[1]
    with device_guard(state):
        advance_rows_kernel[(state.shape[1],)](
            state, state.stride(0), state.shape[0] - 5, tokens.contiguous(), width, num_emitted, status, faults, count,
            COLUMNS=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip
    return count


ops.implement("place_rows_triton", place_rows)
ops.implement("advance_rows_triton", advance_rows)
