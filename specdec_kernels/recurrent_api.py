"""Operations of recurrent layers (short convolutions, the gated delta rule, state-space models) for models whose rows
can be rolled back.

A layer stores, for each of R rows, one float32 *state*, how many tokens it contains (its *base*), and a *window*: the
raw inputs of the last tokens that were fed, in a ring by position. The first operation after a rollback first takes
from the window what the state lacks, so a rollback itself does nothing, no state is ever copied, and nothing waits for
the device. That is the replay of arXiv 2408.15237, section 4, without a limit on what is kept of a step.

Every token is taken into a state alone, in float32 and in one order of sums. So its result does not depend on how many
tokens it is fed with, or on how many were fed before and rolled back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .backends import operation, unavailable
from .types import Backend


class Feed(NamedTuple):
    """Which tokens a forward feeds to n neighbouring rows.

    The tokens of a row stand in its valid columns, in the order of the columns, at the positions from ``start`` on.
    A row without a valid column is not touched. A row whose first token is at position 0 starts from nothing, whatever
    it held.

    The tokens before ``start`` must have been fed. Those that the state lacks must be in the window: with T places,
    no more than T tokens may be fed from ``commit`` on before the next ``commit``.
    """

    start: torch.Tensor  # [n] int64: the position of a row's first token
    commit: torch.Tensor  # [n] int64, <= start: the tokens before this position are never rolled back any more
    valid: torch.Tensor  # [n, q] bool: which columns are tokens
    first_row: int = 0  # of the n rows
    keep: bool = False  # none of these tokens is ever rolled back, as in a prompt: there may be more than T of them


class DeltaState(NamedTuple):
    """The state of a layer of the gated delta rule: a matrix [dk, dv] for each head.

    H is a multiple of H_k; each key head serves H / H_k consecutive heads. The decay is of a head (Gated DeltaNet), or
    of each of its dk channels (Kimi Delta Attention).
    """

    state: torch.Tensor  # [R, H, dk, dv] float32
    base: torch.Tensor  # [R] int64
    k: torch.Tensor  # [R, T, H_k, dk]
    v: torch.Tensor  # [R, T, H, dv]
    g: torch.Tensor  # [R, T, H] or [R, T, H, dk]
    beta: torch.Tensor  # [R, T, H]

    @classmethod
    def empty(
        cls, rows: int, window: int, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> DeltaState:
        """Returns the state of ``rows`` rows for inputs like these, with a window of ``window`` tokens."""
        shape = (rows, v.shape[2], k.shape[3], v.shape[3])
        return cls(*_state(shape, k), *(_window(rows, window, x) for x in (k, v, g, beta)))


class SsdState(NamedTuple):
    """The state of a layer of a state-space model: a matrix [p, N] for each head.

    H is a multiple of G; each group of B and C serves H / G consecutive heads. In Mamba-1 every channel is a head with
    p = 1, and there is one group.
    """

    state: torch.Tensor  # [R, H, p, N] float32
    base: torch.Tensor  # [R] int64
    x: torch.Tensor  # [R, T, H, p]
    dt: torch.Tensor  # [R, T, H]
    B: torch.Tensor  # [R, T, G, N]

    @classmethod
    def empty(cls, rows: int, window: int, x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor) -> SsdState:
        """Returns the state of ``rows`` rows for inputs like these, with a window of ``window`` tokens."""
        shape = (rows, x.shape[2], x.shape[3], B.shape[3])
        return cls(*_state(shape, x), *(_window(rows, window, i) for i in (x, dt, B)))


def conv_window(
    window: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    feed: Feed,
    *,
    silu: bool = False,
    backend: Backend | str = Backend.AUTO,
) -> torch.Tensor:
    """Computes a causal convolution over each channel, and stores the inputs: y_t = sum_j weight_j x_(t-k+1+j) + bias.

    Args:
        window: [R, M, C], M >= k - 1 + T: inputs by position modulo M. It is written.
        x: [n, q, C], of the dtype of ``window``.
        weight: [C, k], k >= 1; the last column is that of the token itself.
        bias: [C], or None.
        silu: whether y becomes y / (1 + exp(-y)).
        backend: as for ``draft_step``.

    Returns:
        [n, q, C]; 0 in columns that are not valid.

    Raises:
        ValueError: a tensor has another shape, dtype or device.
        RuntimeError: ``backend`` cannot run here.
    """
    _check("window", window, (None, None, None), x.device)
    _check("x", x, (None, None, window.shape[2]), x.device, window.dtype)
    _check("weight", weight, (window.shape[2], None), x.device)
    if bias is not None:
        _check("bias", bias, (window.shape[2],), x.device)
    if window.shape[1] < weight.shape[1]:
        raise ValueError(
            f"window: got {window.shape[1]} places, allowed: >= {weight.shape[1]} for a kernel of that size"
        )
    _check_feed(feed, x, window.shape[0])
    arguments = (window, x, weight, bias, silu, feed.start, feed.valid, feed.first_row)
    return operation("conv_window", _backend(backend, x), x.device.type)(*arguments)


def delta_step(
    state: DeltaState,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    feed: Feed,
    *,
    normalize: bool = True,
    backend: Backend | str = Backend.AUTO,
) -> torch.Tensor:
    """Takes tokens into a state by the gated delta rule, and reads it after each of them: S <- exp(g) S; S <- S + k
    (beta (v - k^T S))^T; o = S^T q / sqrt(dk) (Gated Delta Networks, arXiv 2412.06464, equation 10; with a decay for
    each channel, Kimi Linear, arXiv 2510.26692, section 3).

    Args:
        state: of R rows. It is written.
        q, k: [n, q, H_k, dk].
        v: [n, q, H, dv].
        g: [n, q, H] or [n, q, H, dk], the logarithm of the decay.
        beta: [n, q, H].
        normalize: whether q and k are divided by sqrt(|.|^2 + 1e-6) first.
        backend: as for ``draft_step``.

    Returns:
        [n, q, H, dv] float32; 0 in columns that are not valid.

    Raises:
        ValueError: a tensor has another shape, dtype or device.
        RuntimeError: ``backend`` cannot run here.
    """
    rows, heads, dk, dv = state.state.shape
    key_heads = state.k.shape[2]
    for name, x, shape, of in (
        ("q", q, (None, None, key_heads, dk), q.dtype),
        ("k", k, (None, None, key_heads, dk), state.k.dtype),
        ("v", v, (None, None, heads, dv), state.v.dtype),
        ("g", g, (None, None, *state.g.shape[2:]), state.g.dtype),
        ("beta", beta, (None, None, heads), state.beta.dtype),
    ):
        _check(name, x, shape, state.state.device, of)
    _check_feed(feed, q, rows)
    arguments = (*state, q, k, v, g, beta, feed.start, feed.commit, feed.valid, feed.first_row, feed.keep, normalize)
    return operation("delta_step", _backend(backend, q), q.device.type)(*arguments)


def ssd_step(
    state: SsdState,
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    feed: Feed,
    *,
    backend: Backend | str = Backend.AUTO,
) -> torch.Tensor:
    """Takes tokens into the state of a selective state-space model, and reads it after each of them: S <- exp(dt A) S +
    dt x B^T; y = S C + D x (Mamba, arXiv 2312.00752, Algorithm 2; Mamba-2, arXiv 2405.21060, section 6).

    Args:
        state: of R rows. It is written.
        x: [n, q, H, p].
        dt: [n, q, H], the step sizes, after their bias, softplus and bounds.
        B, C: [n, q, G, N].
        A: [H] float32, or [H, N] with a decay for each number of a state.
        D: [H] float32, or None.
        backend: as for ``draft_step``.

    Returns:
        [n, q, H, p] float32; 0 in columns that are not valid.

    Raises:
        ValueError: a tensor has another shape, dtype or device.
        RuntimeError: ``backend`` cannot run here.
    """
    rows, heads, size, numbers = state.state.shape
    groups = state.B.shape[2]
    for name, given, shape, of in (
        ("x", x, (None, None, heads, size), state.x.dtype),
        ("dt", dt, (None, None, heads), state.dt.dtype),
        ("B", B, (None, None, groups, numbers), state.B.dtype),
        ("C", C, (None, None, groups, numbers), C.dtype),
        ("A", A, (heads,) if A.dim() == 1 else (heads, numbers), A.dtype),
    ):
        _check(name, given, shape, state.state.device, of)
    if D is not None:
        _check("D", D, (heads,), state.state.device)
    _check_feed(feed, x, rows)
    arguments = (*state, x, dt, B, C, A, D, feed.start, feed.commit, feed.valid, feed.first_row, feed.keep)
    return operation("ssd_step", _backend(backend, x), x.device.type)(*arguments)


def _state(shape: tuple[int, ...], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return like.new_zeros(shape, dtype=dtype), like.new_zeros(shape[0], dtype=torch.int64)


def _window(rows: int, window: int, x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(rows, window, *x.shape[2:])


def _check(
    name: str,
    x: torch.Tensor,
    shape: tuple[int | None, ...],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> None:
    fits = x.dim() == len(shape) and all(want in (None, size) for size, want in zip(x.shape, shape, strict=True))
    if not fits or x.device != device or x.dtype != (dtype or x.dtype):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        allowed = f"{dtype or 'floating point'} of shape [{wanted}] on {device}"
        raise ValueError(f"{name}: got {x.dtype} of shape {list(x.shape)} on {x.device}, allowed: {allowed}")


def _check_feed(feed: Feed, x: torch.Tensor, rows: int) -> None:
    size, columns = x.shape[:2]
    _check("start", feed.start, (size,), x.device, torch.int64)
    _check("commit", feed.commit, (size,), x.device, torch.int64)
    _check("valid", feed.valid, (size, columns), x.device, torch.bool)
    if not 0 <= feed.first_row <= rows - size:
        raise ValueError(f"first_row: got {feed.first_row} for {size} rows, allowed: 0 to {rows - size}")


def _backend(backend: Backend | str, x: torch.Tensor) -> Backend:
    """Native code is for float32 on a CPU alone."""
    chosen, kind = Backend(backend), x.device.type
    if chosen == Backend.CUDA:
        raise RuntimeError("backend 'cuda' cannot run here: of recurrent layers it has no operation, triton has all")
    if chosen != Backend.AUTO:
        return chosen
    if kind == "cpu":
        return Backend.AUTO if x.dtype == torch.float32 else Backend.REFERENCE
    return Backend.TRITON if unavailable(Backend.TRITON, kind) is None else Backend.REFERENCE
