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

from .backends import Backend, operation, runs

_CPU_DTYPES, _GPU_DTYPES = (torch.float32,), (torch.float32, torch.bfloat16, torch.float16)


class Feed(NamedTuple):
    """Which tokens a forward feeds to n neighbouring rows.

    The tokens of a row stand in its valid columns, in the order of the columns, at the positions from ``start`` on.
    A row without a valid column is not touched. A row whose first token is at position 0 starts from nothing, whatever
    it held.

    The tokens before ``start`` must have been fed. Those that the state lacks must be in the window: with T places,
    no more than T tokens may be fed from ``commit`` on before the next ``commit``.

    A token of a tree gives what it would as the last one of a chain, its ancestors and itself. The token in column c
    takes the place of position ``start`` + c in every window; before the next tokens are fed, those of the accepted
    path must be moved to the places of their own positions.
    """

    start: torch.Tensor  # [n] int64: the position of a row's first token
    commit: torch.Tensor  # [n] int64, <= start: the tokens before this position are never rolled back any more
    valid: torch.Tensor  # [n, q] bool: which columns are tokens
    first_row: int = 0  # of the n rows
    keep: bool = False  # none of these tokens is ever rolled back, as in a prompt: there may be more than T of them
    # [n, q] int64: the tokens are a tree's, each after the one in the column that stands here, or, at -1, after those
    # before ``start``. A token comes after its parent, and with it its parent is valid. None: they are a chain.
    parents: torch.Tensor | None = None


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
    backend: str = Backend.AUTO,
) -> torch.Tensor:
    """Computes a causal convolution over each channel, and stores the inputs: y_t = sum_j weight_j x_(t-k+1+j) + bias.

    Args:
        window: [R, M, C], M >= k - 1 + T: inputs by position modulo M. It is written.
        x: [n, q, C], of the dtype of ``window``.
        weight: [C, k], k >= 1; the last column is that of the token itself.
        bias: [C], or None.
        silu: whether y becomes y / (1 + exp(-y)).
        backend: ``auto``, ``reference``, ``cpu`` or ``triton``. An explicit choice never falls back.

    Returns:
        [n, q, C]; 0 in columns that are not valid.

    Raises:
        ValueError: a tensor has another shape, dtype or device.
        RuntimeError: ``backend`` cannot run here.
    """
    rows, _, channels = _shape("window", window, 3)
    n, columns = _shape("x", x, 3)[:2]
    _check("x", x, (n, columns, channels), window.dtype, window)
    _check("weight", weight, (channels, _shape("weight", weight, 2)[1]), weight.dtype, window)
    if bias is not None:
        _check("bias", bias, (channels,), bias.dtype, window)
    if window.shape[1] < weight.shape[1]:
        raise ValueError(
            f"window: got {window.shape[1]} places, allowed: >= {weight.shape[1]} for a kernel of that size"
        )
    _check_feed(feed, x, rows)
    arguments = (window, x, weight, bias, silu, feed.start, feed.valid, feed.parents, feed.first_row)
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
    backend: str = Backend.AUTO,
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
        backend: ``auto``, ``reference``, ``cpu`` or ``triton``. An explicit choice never falls back.

    Returns:
        [n, q, H, dv] float32; 0 in columns that are not valid.

    Raises:
        ValueError: a tensor has another shape, dtype or device.
        RuntimeError: ``backend`` cannot run here.
    """
    held, of = state.state, (state.k.dtype, state.v.dtype, state.g.dtype, state.beta.dtype)
    rows, heads, dk, dv = held.shape
    (n, columns), key_heads = _shape("q", q, 4)[:2], state.k.shape[2]
    _check("q", q, (n, columns, key_heads, dk), q.dtype, held)
    _check("k", k, (n, columns, key_heads, dk), of[0], held)
    _check("v", v, (n, columns, heads, dv), of[1], held)
    _check("g", g, (n, columns, *state.g.shape[2:]), of[2], held)
    _check("beta", beta, (n, columns, heads), of[3], held)
    _check_feed(feed, q, rows)
    arguments = (*state, q, k, v, g, beta, *_feed(feed), normalize)
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
    backend: str = Backend.AUTO,
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
        backend: ``auto``, ``reference``, ``cpu`` or ``triton``. An explicit choice never falls back.

    Returns:
        [n, q, H, p] float32; 0 in columns that are not valid.

    Raises:
        ValueError: a tensor has another shape, dtype or device.
        RuntimeError: ``backend`` cannot run here.
    """
    held = state.state
    rows, heads, size, numbers = held.shape
    (n, columns), groups = _shape("x", x, 4)[:2], state.B.shape[2]
    _check("x", x, (n, columns, heads, size), state.x.dtype, held)
    _check("dt", dt, (n, columns, heads), state.dt.dtype, held)
    _check("B", B, (n, columns, groups, numbers), state.B.dtype, held)
    _check("C", C, (n, columns, groups, numbers), C.dtype, held)
    _check("A", A, (heads,) if A.dim() == 1 else (heads, numbers), A.dtype, held)
    if D is not None:
        _check("D", D, (heads,), D.dtype, held)
    _check_feed(feed, x, rows)
    arguments = (*state, x, dt, B, C, A, D, *_feed(feed))
    return operation("ssd_step", _backend(backend, x), x.device.type)(*arguments)


def _state(shape: tuple[int, ...], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return like.new_zeros(shape, dtype=dtype), like.new_zeros(shape[0], dtype=torch.int64)


def _window(rows: int, window: int, x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(rows, window, *x.shape[2:])


def _shape(name: str, x: torch.Tensor, dimensions: int) -> torch.Size:
    if x.dim() != dimensions:
        raise ValueError(f"{name}: got shape {list(x.shape)}, allowed: {dimensions} dimensions")
    return x.shape


def _check(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, beside: torch.Tensor) -> None:
    if x.shape != shape or x.dtype != dtype or x.device != beside.device:
        allowed = f"{dtype} of shape {list(shape)} on {beside.device}"
        raise ValueError(f"{name}: got {x.dtype} of shape {list(x.shape)} on {x.device}, allowed: {allowed}")


def _check_feed(feed: Feed, x: torch.Tensor, rows: int) -> None:
    size, columns = x.shape[:2]
    _check("start", feed.start, (size,), torch.int64, x)
    _check("commit", feed.commit, (size,), torch.int64, x)
    _check("valid", feed.valid, (size, columns), torch.bool, x)
    if not 0 <= feed.first_row <= rows - size:
        raise ValueError(f"first_row: got {feed.first_row} for {size} rows, allowed: 0 to {rows - size}")
    if (parents := feed.parents) is None:
        return
    _check("parents", parents, (size, columns), torch.int64, x)
    if feed.keep:
        raise ValueError("keep: got True with parents, allowed: False for trees")
    if parents.device.type == "cpu":  # elsewhere nothing waits for the device
        wrong = feed.valid & ((parents < -1) | (parents >= torch.arange(columns)))
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            given = f"{int(parents[row, column])} in column {column}"
            raise ValueError(f"parents: got {given}, allowed: -1, or a column before it")


def _feed(feed: Feed) -> tuple[torch.Tensor | int | None, ...]:
    return feed.start, feed.commit, feed.valid, feed.parents, feed.first_row, feed.keep


def _backend(backend: str, x: torch.Tensor) -> Backend:
    chosen, kind = Backend(backend), x.device.type
    if chosen != Backend.AUTO:
        return chosen
    fast, dtypes = (Backend.CPU, _CPU_DTYPES) if kind == "cpu" else (Backend.TRITON, _GPU_DTYPES)
    return fast if x.dtype in dtypes and runs(fast, kind) else Backend.REFERENCE
