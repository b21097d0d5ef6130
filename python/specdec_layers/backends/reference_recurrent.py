"""The oracle of the operations of recurrent layers: one token after another, in eager PyTorch. No number of Python
depends on the device, so it can be captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..ops import implement


class _Place(NamedTuple):
    """Where the rows of a forward stand, [n] each. ``tokens`` says how many a row is fed, ``begin`` how many its state
    contains."""

    begin: torch.Tensor
    commit: torch.Tensor
    start: torch.Tensor
    tokens: torch.Tensor
    number: torch.Tensor  # [n, q]: of each column's token: its column in a tree, otherwise how many come before it
    valid: torch.Tensor  # [n, q]

    @classmethod
    def of(
        cls,
        base: torch.Tensor,
        start: torch.Tensor,
        commit: torch.Tensor,
        valid: torch.Tensor,
        parents: torch.Tensor | None,
    ) -> _Place:
        begin = torch.where(start == 0, 0, base)
        commit = torch.minimum(torch.maximum(commit, begin), start)
        number = valid.cumsum(1) - 1 if parents is None else _columns(valid)
        return cls(begin, commit, start, valid.sum(1), number, valid)


def _columns(valid: torch.Tensor) -> torch.Tensor:
    return torch.arange(valid.shape[1], device=valid.device).expand(valid.shape)


def _chain(valid: torch.Tensor) -> torch.Tensor:
    """Returns the column of the token before each one, [n, q], or -1."""
    last = torch.where(valid, _columns(valid), -1).cummax(1).values
    return torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1) if valid.shape[1] else last


def conv_window(window, x, weight, bias, silu, start, valid, parents, first_row):
    (size, columns, channels), (_, places, _), k = x.shape, window.shape, weight.shape[1]
    rows, index = slice(first_row, first_row + size), torch.arange(size, device=x.device)[:, None]
    place = _Place.of(start, start, start, valid, parents)
    before = _chain(valid) if parents is None else parents
    wide, at = torch.promote_types(x.dtype, torch.float32), _columns(valid)
    inputs: list[torch.Tensor] = []  # the token's own, then those of the tokens before it
    for _ in range(k if columns else 0):
        # Columns below 0 are positions before ``start``.
        position = start[:, None] + at
        past = torch.where((position >= 0)[..., None], window[rows][index, position % places], 0)
        fed = x.gather(1, at.clamp(min=0)[..., None].expand(-1, -1, channels))
        inputs.append(torch.where((at >= 0)[..., None], fed, past).to(wide))
        at = torch.where(at >= 0, before.gather(1, at.clamp(min=0)), at - 1)
    y = x.new_zeros(x.shape, dtype=wide)
    for j, own in enumerate(reversed(inputs)):
        y = y + own * weight[:, j]
    y = y if bias is None else y + bias
    y = torch.nn.functional.silu(y) if silu else y
    kept = valid & (place.number >= place.tokens[:, None] - places)
    _store(window, x, (start[:, None] + place.number) % places, kept, first_row)
    return torch.where(valid[..., None], y, 0).to(x.dtype)


def delta_step(
    state, base, wk, wv, wg, wbeta, q, k, v, g, beta, start, commit, valid, parents, first_row, keep, normalize
):  # fmt: skip
    heads, dk, dtype = v.shape[2], k.shape[3], state.dtype

    def by_head(x):  # [n, H_k, dk] -> [n, H, dk]
        x = x.to(dtype)
        x = x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt() if normalize else x
        return x.repeat_interleave(heads // x.shape[1], 1)

    def take(S, k, v, g, beta):
        decay = g.to(dtype).exp()
        S = S * (decay[..., None] if g.dim() == 3 else decay[..., None, None])
        k = by_head(k)[..., None]
        u = beta.to(dtype)[..., None] * (v.to(dtype) - (S * k).sum(-2))
        return S + k * u[..., None, :]

    def read(S, j):
        return (S * by_head(q[:, j])[..., None]).sum(-2) * dk**-0.5

    window, inputs = (wk, wv, wg, wbeta), (k, v, g, beta)
    return _scan(state, base, window, inputs, take, read, start, commit, valid, parents, first_row, keep)


def ssd_step(state, base, wx, wdt, wB, x, dt, B, C, A, D, start, commit, valid, parents, first_row, keep):
    heads, dtype = x.shape[2], state.dtype

    def by_head(x):  # [n, G, N] -> [n, H, N]
        return x.to(dtype).repeat_interleave(heads // x.shape[1], 1)

    def take(S, x, dt, B):
        dt = dt.to(dtype)
        decay = (dt[..., None] * A if A.dim() == 2 else (dt * A)[..., None]).exp()
        return S * decay[:, :, None] + (dt[..., None] * x.to(dtype))[..., None] * by_head(B)[:, :, None]

    def read(S, j):
        y = (S * by_head(C[:, j])[:, :, None]).sum(-1)
        return y if D is None else y + x[:, j].to(dtype) * D[:, None]

    window, inputs = (wx, wdt, wB), (x, dt, B)
    return _scan(state, base, window, inputs, take, read, start, commit, valid, parents, first_row, keep)


def _scan(
    state: torch.Tensor,
    base: torch.Tensor,
    window: tuple[torch.Tensor, ...],
    inputs: tuple[torch.Tensor, ...],
    take: Callable[..., torch.Tensor],
    read: Callable[[torch.Tensor, int], torch.Tensor],
    start: torch.Tensor,
    commit: torch.Tensor,
    valid: torch.Tensor,
    parents: torch.Tensor | None,
    first_row: int,
    keep: bool,
) -> torch.Tensor:
    """Runs a recurrence. ``take(S, *inputs)`` returns the states after one token of each row, and ``read(S, j)`` what
    is read of them after the token in column j."""
    (size, columns), places = valid.shape, window[0].shape[1]
    rows, index = slice(first_row, first_row + size), torch.arange(size, device=state.device)
    place = _Place.of(base[rows], start, commit, valid, parents)

    def where(condition: torch.Tensor, new: torch.Tensor, old: torch.Tensor | float) -> torch.Tensor:
        return torch.where(condition.view(-1, *[1] * (new.dim() - 1)), new, old)

    S = committed = where(place.begin > 0, state[rows], 0.0)
    for t in range(places):
        position = place.begin + t
        S = where(position < start, take(S, *(w[rows][index, position % places] for w in window)), S)
        committed = where(position < place.commit, S, committed)
    outs, states = [], [S]  # of a tree: the states before its first token, and after each of them
    for j in range(columns):
        if parents is not None:
            S = torch.stack(states)[parents[:, j].clamp(-1, j - 1) + 1, index]
        S = where(valid[:, j], take(S, *(x[:, j] for x in inputs)), S)
        outs.append(where(valid[:, j], read(S, j), 0.0))
        if parents is not None:
            states.append(S)
    fed = place.tokens > 0
    state[rows] = where(fed, S if keep else committed, state[rows])
    base[rows] = torch.where(fed, start + place.tokens if keep else place.commit, base[rows])
    if not keep:
        to = (start[:, None] + place.number) % places
        for w, x in zip(window, inputs, strict=True):
            _store(w, x, to, valid, first_row)
    return torch.stack(outs, 1) if outs else state.new_zeros(size, 0, *state.shape[1:3])


def _store(window: torch.Tensor, x: torch.Tensor, to: torch.Tensor, kept: torch.Tensor, first_row: int) -> None:
    """Stores ``x`` [n, q, ...] at the places ``to`` [n, q] of the window's rows, where ``kept``."""
    rows = window[first_row : first_row + len(x)]
    index = torch.arange(len(x), device=x.device)
    for j in range(x.shape[1]):
        old = rows[index, to[:, j]]
        rows[index, to[:, j]] = torch.where(kept[:, j].view(-1, *[1] * (old.dim() - 1)), x[:, j], old)


implement("conv_window_reference", conv_window)
implement("delta_step_reference", delta_step)
implement("ssd_step_reference", ssd_step)
