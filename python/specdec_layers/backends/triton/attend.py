"""``store_and_attend`` in one launch: a worker of each row and part of a group of heads rotates and stores those new
keys whose slots are its own, then reads its slots with a running maximum. The worker that ends last adds the parts.

Slots are divided into ranges by their numbers alone, each range has a part of its own, and the parts are added in the
order of the ranges. Eight tokens have places in a program's tile, however many there are. So a query's bits depend
neither on the number of tokens, rows, slots or workers, nor on where its row is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ... import ops
from .elementwise import rounded
from .launch import contiguous, dense_rows, device_guard, registers
from .recurrent import floats

TOKENS = tl.constexpr(ops.MOST_ATTENDING)
SLOTS = tl.constexpr(128)  # of the shortest ranges; there are 16 of these, then 8 for each doubling of the slots
LOG2E = tl.constexpr(1.4426950408889634)
LOW = tl.constexpr(-1e30)  # the score of what is not seen; infinities would become NaN
_HEADS = 8  # most query heads of a program
# By bytes of a number: most of a program's results, of its lines and a value's numbers, and of the keys that it reads
# at once. More of float32, whose products are not those of tensor cores, would not fit in registers.
_RESULTS = {2: 8192, 4: 1024}
_KEYS = {2: 8192, 4: 2048}
_WORKERS = 256  # of all rows and key heads, if there are ranges for them
_LEAST_WORKERS = 4  # of a row


@triton.jit
def range_of(slot):
    """The number of the range that ``slot`` is in: that of a float with three bits of mantissa."""
    units = slot // SLOTS
    doublings = tl.maximum((units.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 130, 0)
    return 8 * doublings + (units >> doublings)


@triton.jit
def first_slot(number):
    doublings = tl.maximum(number // 8 - 1, 0)
    return ((number - 8 * doublings) << doublings) * SLOTS


@triton.jit
def inside(there, numbers, first: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Which numbers from ``first`` on are some of a line of ``SIZE``, for the lines that are there."""
    if first + WIDTH <= SIZE:
        return there[:, None]
    else:
        return there[:, None] & (first + numbers < SIZE)[None, :]


@triton.jit
def turned(
    a, b, cos_ptr, sin_ptr, angle, there, d, like, HALF: tl.constexpr, WIDTH: tl.constexpr, SECOND: tl.constexpr
):
    """Both halves of heads, turned by the angles from ``angle`` on, and rounded as transformers rounds them."""
    its = inside(there, d, 0, HALF, WIDTH)
    at = angle[:, None] + d[None, :]
    cos, sin = floats(cos_ptr, at, its), floats(sin_ptr, at, its)
    first = rounded(a * cos, like) - rounded(b * sin, like)
    if SECOND > 0:
        cos, sin = floats(cos_ptr, at + SECOND, its), floats(sin_ptr, at + SECOND, its)
    return first, rounded(b * cos, like) + rounded(a * sin, like)


@triton.jit
def extent(seen_ptr, row, tokens, paths, capacity):
    """(the first and the last slot that a query of the row sees, the largest end of their ranges)."""
    token = tl.arange(0, TOKENS)
    there = token < tokens
    at = seen_ptr + (row * tokens + token) * (2 + paths)
    first = tl.min(tl.load(at, mask=there, other=capacity), 0)
    end = tl.max(tl.load(at + 1, mask=there, other=0), 0)
    last = end - 1
    for i in range(paths):
        slot = tl.load(at + 2 + i, mask=there, other=-1)
        first = tl.minimum(first, tl.min(tl.where(slot >= 0, slot, capacity), 0))
        last = tl.maximum(last, tl.max(slot, 0))
    first = tl.minimum(tl.maximum(first, 0), capacity - 1)
    last = tl.minimum(tl.maximum(last, first), capacity - 1)
    return first.to(tl.int32), last.to(tl.int32), end


@triton.jit
def store_new(
    k, v, keys, values, slots_ptr, cos_ptr, sin_ptr, q_ptr, angle, k_token, v_token, angle_token, tokens,
    first_range, last_range,
    HALF: tl.constexpr, SIZE: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr, VALUES_WIDTH: tl.constexpr,
    SECOND: tl.constexpr,
):  # fmt: skip
    """Turns and stores those new keys and values whose slots this worker reads; what no query sees, the first does."""
    token, d, e = tl.arange(0, TOKENS), tl.arange(0, WIDTH), tl.arange(0, VALUES_WIDTH)
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=0)
    number = range_of(slot.to(tl.int32))
    read = (number >= first_range) & (number <= last_range)
    owner = tl.where(read, (number - first_range) % tl.num_programs(2), 0)
    mine = (token < tokens) & (owner == tl.program_id(2))
    first, second = inside(mine, d, 0, HALF, WIDTH), inside(mine, d, HALF, SIZE, WIDTH)
    at = (token * k_token)[:, None] + d[None, :]
    a, b = floats(k, at, first), floats(k, at + HALF, second)
    if cos_ptr is not None:
        a, b = turned(a, b, cos_ptr, sin_ptr, angle + token * angle_token, mine, d, q_ptr, HALF, WIDTH, SECOND)
    to = keys + slot[:, None] * SIZE + d[None, :]
    tl.store(to, rounded(a, q_ptr), mask=first)
    tl.store(to + HALF, rounded(b, q_ptr), mask=second)
    its = inside(mine, e, 0, VALUES, VALUES_WIDTH)
    value = floats(v, (token * v_token)[:, None] + e[None, :], its)
    tl.store(values + slot[:, None] * VALUES + e[None, :], value, mask=its)


@triton.jit
def sum_of_parts(
    parts, sums, first_range, last_range, lines, m, total, r, e, live, VALUES: tl.constexpr, WIDTH: tl.constexpr
):
    """The parts of all ranges, in their order. Those of other programs are in no cache but L2."""
    its = inside(live, e, 0, VALUES, WIDTH)
    o = tl.zeros([r.shape[0], WIDTH], tl.float32)
    for number in tl.range(first_range, last_range + 1, loop_unroll_factor=2):
        line = number * lines + r
        its_m = tl.load(sums + line * 2, mask=live, other=LOW, cache_modifier=".cg")
        its_total = tl.load(sums + line * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
        its_o = tl.load(parts + line[:, None] * VALUES + e[None, :], mask=its, other=0.0, cache_modifier=".cg")
        largest = tl.maximum(m, its_m)
        kept, taken = tl.exp2(m - largest), tl.exp2(its_m - largest)
        o = o * kept[:, None] + its_o * taken[:, None]
        total = total * kept + its_total * taken
        m = largest
    return o / tl.where(total == 0.0, 1.0, total)[:, None]  # what sees nothing is 0


@triton.jit(do_not_specialize=["tokens", "paths", "capacity", "ranges"])
def attend_kernel(
    q_ptr,  # [rows, heads, tokens, SIZE], by strides
    k_ptr,  # [rows, key heads, tokens, SIZE], by strides; None: nothing is stored
    v_ptr,  # [rows, key heads, tokens, VALUES], by strides
    keys_ptr,  # [rows, key heads, capacity, SIZE]
    values_ptr,  # [rows, key heads, capacity, VALUES]
    slots_ptr,  # [rows, tokens]
    seen_ptr,  # [rows, tokens, 2 + paths]
    cos_ptr,  # [rows or 1, tokens, SIZE or SIZE / 2]; None: nothing is turned
    sin_ptr,
    sinks_ptr,  # [heads], or None
    y_ptr,  # [rows, tokens, heads, VALUES]
    parts_ptr,  # [rows, groups, ranges, tokens * HEADS, VALUES]
    sums_ptr,  # [rows, groups, ranges, tokens * HEADS, 2]
    counter_ptr,  # [rows, groups], which are 0 before and after
    q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token, angle_row, angle_token,
    tokens,
    paths,
    capacity,
    ranges,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a key head
    HEADS: tl.constexpr,  # of which a program has so many
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    SECOND: tl.constexpr,  # where the angles of the second half are
    PATHS: tl.constexpr,
    ROWS: tl.constexpr,  # TOKENS * HEADS, or the next power of 2 that tl.dot takes
    WIDTH: tl.constexpr,  # of half a key
    VALUES_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # slots that are read at once
    STAGES: tl.constexpr,
):  # fmt: skip
    PROGRAMS: tl.constexpr = (GROUP + HEADS - 1) // HEADS  # of a key head
    HALF: tl.constexpr = (SIZE + 1) // 2
    row, group, worker = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    groups, workers = tl.num_programs(1), tl.num_programs(2)
    key_head = group // PROGRAMS
    key_heads = groups // PROGRAMS
    of_group = group % PROGRAMS * HEADS
    dtype = q_ptr.dtype.element_ty
    d, e = tl.arange(0, WIDTH), tl.arange(0, VALUES_WIDTH)
    keys_at = (row * key_heads + key_head) * capacity
    first, last, end = extent(seen_ptr, row, tokens, paths, capacity)
    first_range, last_range = range_of(first), range_of(last)
    keys, values = keys_ptr + keys_at * SIZE, values_ptr + keys_at * VALUES
    if k_ptr is not None:
        store_new(
            k_ptr + row * k_row + key_head * k_head, v_ptr + row * v_row + key_head * v_head, keys, values,
            slots_ptr + row * tokens, cos_ptr, sin_ptr, q_ptr, row * angle_row, k_token, v_token, angle_token, tokens,
            first_range, last_range, HALF, SIZE, VALUES, WIDTH, VALUES_WIDTH, SECOND,
        )  # fmt: skip
        tl.debug_barrier()  # other threads read them

    # Line r of the tile is the query of head r % HEADS of token r // HEADS.
    r = tl.arange(0, ROWS)
    of_token, head = r // HEADS, key_head * GROUP + of_group + r % HEADS
    live = (of_token < tokens) & (of_group + r % HEADS < GROUP)
    its, more = inside(live, d, 0, HALF, WIDTH), inside(live, d, HALF, SIZE, WIDTH)
    query = (row * q_row + head * q_head + of_token * q_token)[:, None] + d[None, :]
    a, b = floats(q_ptr, query, its), floats(q_ptr, query + HALF, more)
    if cos_ptr is not None:
        angle = row * angle_row + of_token * angle_token
        a, b = turned(a, b, cos_ptr, sin_ptr, angle, live, d, q_ptr, HALF, WIDTH, SECOND)
    a, b = a.to(dtype), b.to(dtype)
    seen = seen_ptr + (row * tokens + of_token) * (2 + paths)
    begins = tl.minimum(tl.maximum(tl.load(seen, mask=live, other=0), 0), capacity).to(tl.int32)
    ends = tl.minimum(tl.load(seen + 1, mask=live, other=0), capacity).to(tl.int32)
    path = tl.zeros([ROWS], tl.int64)  # bit i: the query sees slot end + i, too
    if PATHS:
        for i in range(paths):
            bit = tl.load(seen + 2 + i, mask=live, other=-1) - end
            known = (bit >= 0) & (bit < 64)
            path |= tl.where(known, tl.full([], 1, tl.int64) << tl.where(known, bit, 0), 0)

    n = tl.arange(0, BLOCK)
    lines = tokens * HEADS
    parts = parts_ptr + (row * groups + group) * ranges * lines * VALUES
    sums = sums_ptr + (row * groups + group) * ranges * lines * 2
    for number in range(first_range + worker, last_range + 1, workers):
        m, total = tl.full([ROWS], LOW, tl.float32), tl.zeros([ROWS], tl.float32)
        o = tl.zeros([ROWS, VALUES_WIDTH], tl.float32)
        stop = tl.minimum(first_slot(number + 1), last + 1)
        # What is not read for any query changes none: blocks begin at multiples of their size.
        for begin in tl.range(tl.maximum(first_slot(number), first // BLOCK * BLOCK), stop, BLOCK, num_stages=STAGES):
            slot = begin + n
            there = (slot >= first) & (slot < stop)
            k = keys + slot[:, None] * SIZE + d[None, :]
            ka = tl.load(k, mask=inside(there, d, 0, HALF, WIDTH), other=0.0).to(dtype)
            kb = tl.load(k + HALF, mask=inside(there, d, HALF, SIZE, WIDTH), other=0.0).to(dtype)
            score = tl.dot(a, tl.trans(ka), input_precision="ieee")
            score = tl.dot(b, tl.trans(kb), score, input_precision="ieee")
            if CAP > 0.0:
                score = (CAP * LOG2E) * (1.0 - 2.0 / (1.0 + tl.exp2(score * (2.0 * LOG2E * SCALE / CAP))))
            else:
                score = score * (SCALE * LOG2E)
            sees = (slot[None, :] >= begins[:, None]) & (slot[None, :] < ends[:, None])
            if PATHS:
                place = slot - end
                near = (place >= 0) & (place < 64)
                bits = path[:, None] >> tl.where(near, place, 0)[None, :]
                sees |= near[None, :] & ((bits & 1) == 1)
            score = tl.where(sees, score, LOW)
            largest = tl.maximum(m, tl.max(score, 1))
            p = tl.where(sees, tl.exp2(score - largest[:, None]), 0.0)
            kept = tl.exp2(m - largest)
            total = total * kept + tl.sum(p, 1)
            v = tl.load(
                values + slot[:, None] * VALUES + e[None, :], mask=inside(there, e, 0, VALUES, VALUES_WIDTH), other=0.0
            ).to(dtype)
            o = tl.dot(p.to(dtype), v, o * kept[:, None], input_precision="ieee")
            m = largest
        line, stored = number * lines + r, r < lines
        part = parts + line[:, None] * VALUES + e[None, :]
        tl.store(part, o, mask=inside(stored, e, 0, VALUES, VALUES_WIDTH))
        tl.store(sums + line * 2, m, mask=stored)
        tl.store(sums + line * 2 + 1, total, mask=stored)

    tl.debug_barrier()  # all threads have stored their parts
    count = counter_ptr + row * groups + group
    if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == workers - 1:
        tl.store(count, 0)
        if sinks_ptr is not None:
            m, total = floats(sinks_ptr, head, live) * LOG2E, tl.full([ROWS], 1.0, tl.float32)
        else:
            m, total = tl.full([ROWS], LOW, tl.float32), tl.zeros([ROWS], tl.float32)
        y = sum_of_parts(parts, sums, first_range, last_range, lines, m, total, r, e, live, VALUES, VALUES_WIDTH)
        to = ((row * tokens + of_token) * key_heads * GROUP + head)[:, None] * VALUES + e[None, :]
        tl.store(y_ptr + to, y, mask=inside(live, e, 0, VALUES, VALUES_WIDTH))


def _range_of(slot: int) -> int:
    """As the kernel's."""
    units = slot // SLOTS.value
    doublings = max(units.bit_length() - 4, 0)
    return 8 * doublings + (units >> doublings)


class _Division(NamedTuple):
    """How the work of a row is divided."""

    of_program: int  # query heads
    groups: int  # of a row
    ranges: int


def _division(key_heads: int, group: int, slots: int, value_size: int, itemsize: int) -> _Division:
    values_width = max(triton.next_power_of_2(value_size), 16)
    of_program = max(min(group, _HEADS, _RESULTS[itemsize] // TOKENS.value // values_width), 1)
    return _Division(of_program, key_heads * triton.cdiv(group, of_program), _range_of(slots - 1) + 1)


def bytes_beside(rows: int, tokens: int, key_heads: int, group: int, slots: int, value_size: int, itemsize: int) -> int:
    """Returns what the parts of a launch take, with their sums."""
    own = _division(key_heads, group, slots, value_size, itemsize)
    return 4 * rows * own.groups * own.ranges * tokens * own.of_program * (value_size + 2)


def store_and_attend(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor | None,
    seen: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    sinks: torch.Tensor | None,
    counter: torch.Tensor | None,
    scale: float,
    cap: float,
) -> torch.Tensor:
    rows, heads, tokens, size = q.shape
    key_heads, capacity, value_size = keys.shape[1], keys.shape[2], values.shape[3]
    group = heads // key_heads
    values_width = max(triton.next_power_of_2(value_size), 16)
    of_program, groups, ranges = _division(key_heads, group, capacity, value_size, q.itemsize)
    lines = triton.next_power_of_2(TOKENS.value * of_program)
    workers = min(max(_WORKERS // max(rows * groups, 1), _LEAST_WORKERS), ranges)
    width = max(triton.next_power_of_2((size + 1) // 2), 16)
    block = min(max(_KEYS[q.itemsize] // (2 * width), 16), 64)
    y = q.new_empty(rows, tokens, heads, value_size)
    if y.numel() == 0:
        return y
    parts = q.new_empty(rows, groups, ranges, tokens * of_program, value_size, dtype=torch.float32)
    sums = parts.new_empty(*parts.shape[:-1], 2)
    counter = torch.zeros(rows * groups, dtype=torch.int32, device=q.device) if counter is None else counter
    num_warps = 8 if lines * values_width > 4096 else 4
    q = dense_rows(q)
    k, v = (None if x is None else dense_rows(x) for x in (k, v))
    with device_guard(q):
        attend_kernel[rows, groups, workers](
            q, k, v, keys, values, contiguous(slots), seen.contiguous(), contiguous(cos), contiguous(sin), sinks, y,
            parts, sums, counter, *_strides(q), *_strides(k), *_strides(v),
            0 if cos is None or cos.shape[0] == 1 else cos.shape[1] * cos.shape[2], 0 if cos is None else cos.shape[2],
            tokens, seen.shape[2] - 2, capacity, ranges,
            SCALE=scale, CAP=cap, GROUP=group, HEADS=of_program, SIZE=size, VALUES=value_size,
            SECOND=size // 2 if cos is not None and cos.shape[2] == size else 0, PATHS=seen.shape[2] > 2, ROWS=lines,
            WIDTH=width, VALUES_WIDTH=values_width, BLOCK=block, STAGES=3 if q.itemsize == 2 else 2,
            # Without a bound, some registers would be spilled for one more program, which shared memory does not hold.
            num_warps=num_warps, **registers(q.device, num_warps),
            # A product that is fused with a sum would not be rounded.
            enable_fp_fusion=q.dtype != torch.float32 or cos is None,
        )  # fmt: skip
    return y


def _strides(x: torch.Tensor | None) -> tuple[int, ...]:
    """Those of rows, heads and tokens. That of a single one does not count, and may be anything."""
    return (0, 0, 0) if x is None else tuple(0 if n == 1 else s for n, s in zip(x.shape[:3], x.stride(), strict=False))


ops.implement("store_and_attend_triton", store_and_attend)
