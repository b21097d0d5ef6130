"""The CUDA kernels of recurrent layers on a CPU, as kernels.py has the others. A launch has some number of threads in a
block of a scan, on which no result depends."""

from __future__ import annotations

import ctypes

import torch

from . import kernels
from .kernels import DTYPES, address, boolean, int32, int64, pointer


class Numbers(ctypes.Structure):
    _fields_ = [("data", pointer), ("dtype", int32)]


class Feed(ctypes.Structure):
    _fields_ = [
        *((name, pointer) for name in ("start", "commit", "valid", "parents")),
        *((name, int64) for name in ("rows", "columns", "first_row", "places")),
    ]  # fmt: skip


class ConvWindowParams(ctypes.Structure):
    _fields_ = [
        *((name, Numbers) for name in ("window", "x", "weight", "bias", "y")),
        ("feed", Feed), ("channels", int64), ("taps", int64), ("silu", boolean),
    ]  # fmt: skip


class DeltaStepParams(ctypes.Structure):
    _fields_ = [
        ("state", pointer), ("base", pointer),
        *((name, Numbers) for name in ("window_k", "window_v", "window_g", "window_beta", "q", "k", "v", "g", "beta")),
        ("out", pointer), ("feed", Feed), *((name, int64) for name in ("heads", "key_heads", "dk", "dv")),
        *((name, boolean) for name in ("by_channel", "keep", "normalize")),
    ]  # fmt: skip


class SsdStepParams(ctypes.Structure):
    _fields_ = [
        ("state", pointer), ("base", pointer),
        *((name, Numbers) for name in ("window_x", "window_dt", "window_b", "x", "dt", "b", "c")),
        ("a", pointer), ("d", pointer), ("out", pointer), ("feed", Feed),
        *((name, int64) for name in ("heads", "size", "groups", "numbers")),
        ("by_number", boolean), ("keep", boolean),
    ]  # fmt: skip


def read(t: torch.Tensor | None, keep: list) -> Numbers:
    return Numbers() if t is None else Numbers(address(t, keep), DTYPES[t.dtype])


def written(t: torch.Tensor) -> Numbers:
    assert t.is_contiguous()
    return Numbers(t.data_ptr(), DTYPES[t.dtype])


def feed(start, commit, valid, parents, first_row: int, places: int, keep: list) -> Feed:
    tensors = (address(t, keep) for t in (start, commit, valid, parents))
    return Feed(*tensors, *valid.shape, first_row, places)


def conv_window(window, x, weight, bias, silu, start, valid, parents, first_row, *, threads: int = 64):
    keep: list = []
    y = torch.full(x.shape, float("nan"), dtype=x.dtype)
    params = ConvWindowParams(
        written(window), *(read(t, keep) for t in (x, weight, bias)), written(y),
        feed(start, start, valid, parents, first_row, window.shape[1], keep), x.shape[2], weight.shape[1], silu,
    )  # fmt: skip
    kernels.call("conv_window", params, threads)
    return y


def delta_step(
    state, base, window_k, window_v, window_g, window_beta, q, k, v, g, beta, start, commit, valid, parents, first_row,
    keep, normalize, *, threads: int = 64,
) -> torch.Tensor:  # fmt: skip
    kept: list = []
    heads, dk, dv = state.shape[1:]
    out = torch.full((*q.shape[:2], heads, dv), float("nan"))
    params = DeltaStepParams(
        state.data_ptr(), base.data_ptr(), *map(written, (window_k, window_v, window_g, window_beta)),
        *(read(t, kept) for t in (q, k, v, g, beta)), out.data_ptr(),
        feed(start, commit, valid, parents, first_row, window_k.shape[1], kept), heads, k.shape[2], dk, dv,
        g.dim() == 4, keep, normalize,
    )  # fmt: skip
    kernels.call("delta_step", params, threads)
    return out


def ssd_step(
    state, base, window_x, window_dt, window_B, x, dt, B, C, A, D, start, commit, valid, parents, first_row, keep, *,
    threads: int = 64,
) -> torch.Tensor:  # fmt: skip
    kept: list = []
    heads, size, numbers = state.shape[1:]
    out = torch.full(x.shape, float("nan"))
    params = SsdStepParams(
        state.data_ptr(), base.data_ptr(), *map(written, (window_x, window_dt, window_B)),
        *(read(t, kept) for t in (x, dt, B, C)), address(A, kept), address(D, kept), out.data_ptr(),
        feed(start, commit, valid, parents, first_row, window_x.shape[1], kept), heads, size, B.shape[2], numbers,
        A.dim() == 2, keep,
    )  # fmt: skip
    kernels.call("ssd_step", params, threads)
    return out
