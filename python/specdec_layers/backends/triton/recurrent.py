"""``conv_window`` in one launch, ``delta_step`` and ``ssd_step`` in two: a program has a part of a state in registers
while all tokens of its row pass over it; then the inputs of tokens that may be rolled back are stored."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ... import ops
from .launch import contiguous, device_guard, options

_COLUMNS = 32  # of a head's state, or channels of a convolution, in a program
_NUMBERS = 2048  # of the lines of a group's states in a program


class Feed(NamedTuple):
    """As in csrc/layers/feed.h."""

    start_ptr: torch.Tensor
    commit_ptr: torch.Tensor
    valid_ptr: torch.Tensor
    columns: int
    first_row: int
    places: int


@triton.jit
def count_valid(feed, row):
    count = tl.full([], 0, tl.int64)
    for column in range(feed.columns):
        count += tl.load(feed.valid_ptr + row * feed.columns + column).to(tl.int64)
    return count


@triton.jit
def fed_row(feed, row, base_ptr):
    """(begin, commit, start): the state has the tokens before ``begin``, and takes those before ``commit`` for good."""
    start = tl.load(feed.start_ptr + row)
    base = tl.load(base_ptr + feed.first_row + row)
    begin = tl.where(start == 0, 0, base)
    commit = tl.minimum(tl.maximum(tl.load(feed.commit_ptr + row), begin), start)
    return begin, commit, start


@triton.jit
def floats(ptr, offsets, mask):
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def follows_another(parent_ptr, column):
    """Whether a tree's token follows another one than that before it, whose state is at hand."""
    parent = tl.load(parent_ptr)
    return (parent != column - 1) | (parent < 0)


@triton.jit
def ancestors(parents_ptr, row, column, feed):
    """Returns how many of a tree's tokens the one in ``column`` follows."""
    count = tl.full([], 0, tl.int32)
    at = tl.load(parents_ptr + row * feed.columns + column)
    while at >= 0:
        count += 1
        at = tl.load(parents_ptr + row * feed.columns + at)
    return count


@triton.jit
def ancestor(parents_ptr, row, column, back, feed):
    """Returns the number of the token, over all rows, that is so many edges above the one in ``column``."""
    at = tl.full([], 0, tl.int64) + column
    for _ in range(back):
        at = tl.load(parents_ptr + row * feed.columns + at)
    return row * feed.columns + at


# ---- conv_window -----------------------------------------------------------------------------------------------------


@triton.jit
def past(ring, start, channel, tap, mask, channels, PADDED: tl.constexpr, feed):
    """Returns the inputs of the last positions before ``start``, [channels, PADDED]."""
    position = start - PADDED + tap
    place = (position + PADDED * feed.places) % feed.places  # not below 0, where remainders have other rules
    return floats(ring, place[None, :] * channels + channel[:, None], mask & (position >= 0)[None, :])


@triton.jit
def path(x_ptr, ring, start, row, column, channel, tap, mask, channels, parents_ptr, PADDED: tl.constexpr, feed):
    """Returns the inputs of a tree's token and of those that it follows, the last one's first; below column 0 they are
    of the positions before ``start``."""
    inputs = tl.zeros(mask.shape, tl.float32)
    at = tl.full([], 0, tl.int64) + column
    for back in tl.static_range(PADDED):
        own = mask & (tap == PADDED - 1 - back)[None, :]
        if at >= 0:
            token = row * feed.columns + at
            inputs = tl.where(own, floats(x_ptr, token * channels + channel, channel < channels)[:, None], inputs)
            at = tl.load(parents_ptr + token)
        else:
            if start + at >= 0:
                place = (start + at) % feed.places
                inputs = tl.where(own, floats(ring, place * channels + channel, channel < channels)[:, None], inputs)
            at -= 1
    return inputs


@triton.jit(do_not_specialize=["channels"])
def conv_window_kernel(
    window_ptr,  # [R, places, channels]
    x_ptr,  # [rows, columns, channels]
    weight_ptr,  # [channels, TAPS]
    bias_ptr,  # [channels], or None
    y_ptr,  # [rows, columns, channels]
    parents_ptr,  # [rows, columns], or None
    feed,
    channels,
    SILU: tl.constexpr,
    TAPS: tl.constexpr,
    PADDED: tl.constexpr,  # TAPS, or the next power of 2
    BLOCK: tl.constexpr,
):
    parts = tl.cdiv(channels, BLOCK)
    at = tl.program_id(0).to(tl.int64)
    row = at // parts
    channel = at % parts * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    tap = tl.arange(0, PADDED)  # the last one is that of the token itself
    own = tap >= PADDED - TAPS
    both = inside[:, None] & own[None, :]
    weight = floats(weight_ptr, channel[:, None] * TAPS + (tap - (PADDED - TAPS))[None, :], both)
    start = tl.load(feed.start_ptr + row)
    count = count_valid(feed, row)
    ring = window_ptr + (feed.first_row + row) * feed.places * channels
    inputs = past(ring, start, channel, tap, both, channels, PADDED, feed)
    moved = tap[None, :, None] + 1 == tap[None, None, :]
    rank = tl.full([], 0, tl.int64)
    for column in range(feed.columns):
        to = (row * feed.columns + column) * channels + channel
        y = tl.zeros([BLOCK], tl.float32)
        if tl.load(feed.valid_ptr + row * feed.columns + column) != 0:
            x = tl.load(x_ptr + to, mask=inside, other=0.0)
            if parents_ptr is None:
                inputs = tl.sum(tl.where(moved, inputs[:, None, :], 0.0), 2)
            else:
                rank = tl.full([], 0, tl.int64) + column
                inputs = path(x_ptr, ring, start, row, column, channel, tap, both, channels, parents_ptr, PADDED, feed)
            inputs = tl.where(tap[None, :] == PADDED - 1, x.to(tl.float32)[:, None], inputs)
            y = tl.sum(tl.where(own[None, :], inputs * weight, 0.0), 1)
            if bias_ptr is not None:
                y += floats(bias_ptr, channel, inside)
            if SILU:
                y = y / (1.0 + tl.exp(-y))
            if rank >= count - feed.places:
                tl.store(ring + (start + rank) % feed.places * channels + channel, x, mask=inside)
            rank += 1
        tl.store(y_ptr + to, y, mask=inside)


def conv_window(window, x, weight, bias, silu, start, valid, parents, first_row):
    (rows, _, channels), taps = x.shape, weight.shape[1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() > 0:
        feed = _feed(start, start, valid, first_row, window.shape[1])
        with device_guard(x):
            conv_window_kernel[(rows * triton.cdiv(channels, _COLUMNS),)](
                window, x.contiguous(), weight.contiguous(), contiguous(bias), y, contiguous(parents), feed, channels,
                SILU=silu, TAPS=taps, PADDED=max(triton.next_power_of_2(taps), 2), BLOCK=_COLUMNS,
                **options("conv_window_kernel", x.device),
            )  # fmt: skip
    return y


# ---- delta_step ------------------------------------------------------------------------------------------------------


@triton.jit
def unit(x, NORMALIZE: tl.constexpr):
    return x / tl.sqrt(tl.sum(x * x, 0) + 1e-6) if NORMALIZE else x


@triton.jit
def delta_rule(S, inputs, at, head, channel, value, sizes, BY_CHANNEL: tl.constexpr, NORMALIZE: tl.constexpr):
    """Takes the token whose inputs are the ``at``-th into the part S [dk, columns] of a head's state."""
    k_ptr, v_ptr, g_ptr, beta_ptr = inputs
    heads, key_heads, dk, dv = sizes
    key_head = head // (heads // key_heads)
    k = unit(floats(k_ptr, (at * key_heads + key_head) * dk + channel, channel < dk), NORMALIZE)
    v = floats(v_ptr, (at * heads + head) * dv + value, value < dv)
    beta = tl.load(beta_ptr + at * heads + head).to(tl.float32)
    if BY_CHANNEL:
        S = S * tl.exp(floats(g_ptr, (at * heads + head) * dk + channel, channel < dk))[:, None]
    else:
        S = S * tl.exp(tl.load(g_ptr + at * heads + head).to(tl.float32))
    u = beta * (v - tl.sum(S * k[:, None], 0))
    return S + k[:, None] * u[None, :]


@triton.jit
def delta_step_kernel(
    state_ptr,  # [R, heads, dk, dv] float32
    base_ptr,  # [R]
    window,  # k, v, g and beta of tokens by their place: [R, places, ...]
    inputs,  # the same of fed tokens: [rows, columns, ...]
    q_ptr,  # [rows, columns, key_heads, dk]
    out_ptr,  # [rows, columns, heads, dv] float32
    parents_ptr,  # [rows, columns], or None
    feed,
    sizes,  # heads, key_heads, dk, dv
    scale,
    BY_CHANNEL: tl.constexpr,
    KEEP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CHANNELS: tl.constexpr,  # dk, or the next power of 2
    BLOCK: tl.constexpr,
):
    heads, key_heads, dk, dv = sizes
    parts = tl.cdiv(dv, BLOCK)
    at = tl.program_id(0).to(tl.int64)
    row, head = at // parts // heads, at // parts % heads
    value, channel = at % parts * BLOCK + tl.arange(0, BLOCK), tl.arange(0, CHANNELS)
    fed = count_valid(feed, row) > 0
    begin, commit, start = fed_row(feed, row, base_ptr)
    held = feed.first_row + row
    tile = (held * heads + head) * dk * dv + channel[:, None] * dv + value[None, :]
    inside = (channel < dk)[:, None] & (value < dv)[None, :]
    S = tl.zeros([CHANNELS, BLOCK], tl.float32)
    if begin > 0:
        S = tl.load(state_ptr + tile, mask=inside, other=0.0)
    if fed:
        for position in range(begin, commit):
            place = held * feed.places + position % feed.places
            S = delta_rule(S, window, place, head, channel, value, sizes, BY_CHANNEL, NORMALIZE)
        if not KEEP and commit > begin:
            tl.store(state_ptr + tile, S, mask=inside)
        for position in range(commit, start):
            place = held * feed.places + position % feed.places
            S = delta_rule(S, window, place, head, channel, value, sizes, BY_CHANNEL, NORMALIZE)
    root = S
    for column in range(feed.columns):
        token = row * feed.columns + column
        out = tl.zeros([BLOCK], tl.float32)
        if tl.load(feed.valid_ptr + token) != 0:
            if parents_ptr is not None:
                if follows_another(parents_ptr + token, column):
                    S = root
                    for back in range(ancestors(parents_ptr, row, column, feed), 0, -1):
                        before = ancestor(parents_ptr, row, column, back, feed)
                        S = delta_rule(S, inputs, before, head, channel, value, sizes, BY_CHANNEL, NORMALIZE)
            S = delta_rule(S, inputs, token, head, channel, value, sizes, BY_CHANNEL, NORMALIZE)
            to = (token * key_heads + head // (heads // key_heads)) * dk + channel
            q = unit(floats(q_ptr, to, channel < dk), NORMALIZE) * scale
            out = tl.sum(S * q[:, None], 0)
        tl.store(out_ptr + (token * heads + head) * dv + value, out, mask=value < dv)
    if KEEP and fed:
        tl.store(state_ptr + tile, S, mask=inside)


def delta_step(
    state, base, wk, wv, wg, wbeta, q, k, v, g, beta, start, commit, valid, parents, first_row, keep, normalize
):  # fmt: skip
    (rows, columns, key_heads, dk), (heads, dv) = q.shape, v.shape[2:]
    out = state.new_empty((rows, columns, heads, dv))
    if out.numel() > 0:
        window, inputs = (wk, wv, wg, wbeta), tuple(x.contiguous() for x in (k, v, g, beta))
        feed = _feed(start, commit, valid, first_row, wk.shape[1])
        with device_guard(q):
            delta_step_kernel[(rows * heads * triton.cdiv(dv, _COLUMNS),)](
                state, base, window, inputs, q.contiguous(), out, contiguous(parents), feed,
                (heads, key_heads, dk, dv), dk**-0.5, BY_CHANNEL=g.dim() == 4, KEEP=keep, NORMALIZE=normalize,
                CHANNELS=triton.next_power_of_2(dk), BLOCK=_COLUMNS, **options("delta_step_kernel", q.device),
            )  # fmt: skip
            _store(base, window, inputs, parents, feed, rows, keep)
    return out


# ---- ssd_step --------------------------------------------------------------------------------------------------------


@triton.jit
def state_space(S, inputs, at, group, line, number, inside, a, sizes, BY_NUMBER: tl.constexpr):
    """Takes the token whose inputs are the ``at``-th into some lines [BLOCK, numbers] of a group's states."""
    x_ptr, dt_ptr, b_ptr = inputs
    heads, size, groups, numbers = sizes
    lines = heads // groups * size
    head = group * (heads // groups) + line // size
    dt = floats(dt_ptr, at * heads + head, inside)
    x = floats(x_ptr, at * heads * size + group * lines + line, inside)
    b = floats(b_ptr, (at * groups + group) * numbers + number, number < numbers)
    if BY_NUMBER:
        S = S * tl.exp(dt[:, None] * a)
    else:
        S = S * tl.exp(dt * a)[:, None]
    return S + (dt * x)[:, None] * b[None, :]


@triton.jit
def ssd_step_kernel(
    state_ptr,  # [R, heads, size, numbers] float32
    base_ptr,  # [R]
    window,  # x, dt and B of tokens by their place: [R, places, ...]
    inputs,  # the same of fed tokens: [rows, columns, ...]
    c_ptr,  # [rows, columns, groups, numbers]
    a_ptr,  # [heads], or [heads, numbers]
    d_ptr,  # [heads], or None
    out_ptr,  # [rows, columns, heads, size] float32
    parents_ptr,  # [rows, columns], or None
    feed,
    sizes,  # heads, size, groups, numbers
    BY_NUMBER: tl.constexpr,
    KEEP: tl.constexpr,
    NUMBERS: tl.constexpr,  # numbers, or the next power of 2
    BLOCK: tl.constexpr,
):
    heads, size, groups, numbers = sizes
    lines = heads // groups * size  # of the states of a group's heads, below each other
    parts = tl.cdiv(lines, BLOCK)
    at = tl.program_id(0).to(tl.int64)
    row, group = at // parts // groups, at // parts % groups
    line, number = at % parts * BLOCK + tl.arange(0, BLOCK), tl.arange(0, NUMBERS)
    inside = line < lines
    head = group * (heads // groups) + line // size
    fed = count_valid(feed, row) > 0
    begin, commit, start = fed_row(feed, row, base_ptr)
    held = feed.first_row + row
    both = inside[:, None] & (number < numbers)[None, :]
    tile = (held * heads * size + group * lines + line[:, None]) * numbers + number[None, :]
    if BY_NUMBER:
        a = floats(a_ptr, head[:, None] * numbers + number[None, :], both)
    else:
        a = floats(a_ptr, head, inside)
    S = tl.zeros([BLOCK, NUMBERS], tl.float32)
    if begin > 0:
        S = tl.load(state_ptr + tile, mask=both, other=0.0)
    if fed:
        for position in range(begin, commit):
            place = held * feed.places + position % feed.places
            S = state_space(S, window, place, group, line, number, inside, a, sizes, BY_NUMBER)
        if not KEEP and commit > begin:
            tl.store(state_ptr + tile, S, mask=both)
        for position in range(commit, start):
            place = held * feed.places + position % feed.places
            S = state_space(S, window, place, group, line, number, inside, a, sizes, BY_NUMBER)
    root = S
    for column in range(feed.columns):
        token = row * feed.columns + column
        out = tl.zeros([BLOCK], tl.float32)
        if tl.load(feed.valid_ptr + token) != 0:
            if parents_ptr is not None:
                if follows_another(parents_ptr + token, column):
                    S = root
                    for back in range(ancestors(parents_ptr, row, column, feed), 0, -1):
                        before = ancestor(parents_ptr, row, column, back, feed)
                        S = state_space(S, inputs, before, group, line, number, inside, a, sizes, BY_NUMBER)
            S = state_space(S, inputs, token, group, line, number, inside, a, sizes, BY_NUMBER)
            c = floats(c_ptr, (token * groups + group) * numbers + number, number < numbers)
            out = tl.sum(S * c[None, :], 1)
            if d_ptr is not None:
                x = floats(inputs[0], token * heads * size + group * lines + line, inside)
                out += x * floats(d_ptr, head, inside)
        tl.store(out_ptr + token * heads * size + group * lines + line, out, mask=inside)
    if KEEP and fed:
        tl.store(state_ptr + tile, S, mask=both)


def ssd_step(state, base, wx, wdt, wB, x, dt, B, C, A, D, start, commit, valid, parents, first_row, keep):
    (rows, _, heads, size), (groups, numbers) = x.shape, B.shape[2:]
    out = state.new_empty(x.shape)
    if out.numel() > 0:
        window, inputs = (wx, wdt, wB), tuple(i.contiguous() for i in (x, dt, B))
        feed = _feed(start, commit, valid, first_row, wx.shape[1])
        padded = triton.next_power_of_2(numbers)
        block = max(_NUMBERS // padded, 16)
        parts = triton.cdiv(heads // groups * size, block)
        with device_guard(x):
            ssd_step_kernel[(rows * groups * parts,)](
                state, base, window, inputs, C.contiguous(), A.contiguous(), contiguous(D), out,
                contiguous(parents), feed, (heads, size, groups, numbers), BY_NUMBER=A.dim() == 2, KEEP=keep,
                NUMBERS=padded, BLOCK=block, **options("ssd_step_kernel", x.device),
            )  # fmt: skip
            _store(base, window, inputs, parents, feed, rows, keep)
    return out


# ---- what follows ----------------------------------------------------------------------------------------------------


@triton.jit
def copy(x_ptr, to_ptr, numbers, BLOCK: tl.constexpr):
    for first in range(0, numbers, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(to_ptr + at, tl.load(x_ptr + at, mask=at < numbers, other=0.0), mask=at < numbers)


@triton.jit
def store_kernel(base_ptr, window, inputs, numbers, feed, TREE: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    """Notes how many tokens the states contain, and stores the inputs of tokens that may be rolled back. No program of
    the scan is left that could still read what is overwritten here."""
    row = tl.program_id(0).to(tl.int64)
    count = count_valid(feed, row)
    begin, commit, start = fed_row(feed, row, base_ptr)
    held = feed.first_row + row
    if count > 0:
        tl.store(base_ptr + held, start + count if KEEP else commit)
        if not KEEP:
            place = start
            for column in range(feed.columns):
                token = row * feed.columns + column
                if tl.load(feed.valid_ptr + token) != 0:
                    if TREE:
                        place = start + column
                    to = held * feed.places + place % feed.places
                    for i in tl.static_range(len(inputs)):
                        copy(inputs[i] + token * numbers[i], window[i] + to * numbers[i], numbers[i], BLOCK)
                    place += 1


def _store(base, window, inputs, parents, feed: Feed, rows: int, keep: bool) -> None:
    numbers = tuple(x[0, 0].numel() for x in inputs)
    how = options("store_kernel", base.device)
    store_kernel[(rows,)](base, window, inputs, numbers, feed, TREE=parents is not None, KEEP=keep, BLOCK=1024, **how)


def _feed(start, commit, valid, first_row: int, places: int) -> Feed:
    valid = valid.contiguous().view(torch.uint8)
    return Feed(start.contiguous(), commit.contiguous(), valid, valid.shape[1], first_row, places)


ops.implement("conv_window_triton", conv_window)
ops.implement("delta_step_triton", delta_step)
ops.implement("ssd_step_triton", ssd_step)
