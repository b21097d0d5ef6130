"""Products of linear layers on a GPU: of few rows by a kernel of our own (csrc/cuda/linear.h), of more by PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional as F

from specdec_kernels import Packing, build_info, linear, unpack_int8

# Two tiles of the kernel. For a layer of an 8B model, an H200 took 7 % less time by a sketch of it than by cuBLAS with
# one row, 4 % less with 8 and 27 % more with 40, and nothing was measured in between (docs/cuda.md).
MOST_ROWS = 16
# Weights of 8 bits would have to be expanded for cuBLAS, which takes three times the bytes that 16 bits take. 64 rows
# have 240 instructions a kilobyte of weights, where an H100 can issue about 300 while it arrives; not measured yet.
MOST_ROWS_INT8 = 64
EXPANDED = 64 << 20  # bytes of weights that are expanded at a time
DTYPES = (torch.bfloat16, torch.float16)
UNIT = 32  # of whose multiple the kernel takes inputs
DEVICE = "cuda"


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns ``x weight^T + bias`` [..., outputs] of x [..., inputs], as ``torch.nn.functional.linear``. Where weights
    are such as the kernel takes, and there are up to ``MOST_ROWS`` rows, a row's result does not depend, to the last
    bit, on the others. Which of the two computes follows from shapes and dtypes alone, so a graph that was captured
    keeps it.

    Args:
        weight: [outputs, inputs] of a floating dtype, or uint8 as :func:`specdec_kernels.pack_int8` returns it. The
            kernel takes up to ``MOST_ROWS_INT8`` rows of it.
    """
    is_int8 = weight.dtype == torch.uint8
    if not _computes(x, weight, bias):
        return _expanded(x, weight, bias) if is_int8 else F.linear(x, weight, bias)
    rows = x if x.dim() == 3 else x.reshape(1, -1, x.shape[-1])
    packing = Packing.INT8 if is_int8 else Packing.NONE
    return linear(rows, weight, bias, packing).view(*x.shape[:-1], weight.shape[0])


def takes(weight: torch.Tensor) -> bool:
    """Whether the kernel multiplies by these weights [outputs, inputs], without a copy of them."""
    suits = weight.device.type == DEVICE and weight.dtype in DTYPES and weight.is_contiguous()
    return suits and weight.shape[1] % UNIT == 0 and weight.data_ptr() % 16 == 0 and has_kernel()


def _expanded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    outputs = max(EXPANDED // (8 * x.shape[-1] * x.itemsize), 1) * 8
    biases = [None] * len(weight) if bias is None else bias.split(outputs)
    parts = zip(weight.split(outputs), biases, strict=False)
    return torch.cat([F.linear(x, unpack_int8(some, x.dtype), of) for some, of in parts], -1)


def _computes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    is_int8 = weight.dtype == torch.uint8
    if x.device.type != DEVICE or x.numel() > (MOST_ROWS_INT8 if is_int8 else MOST_ROWS) * x.shape[-1]:
        return False
    if not (x.dtype in DTYPES and has_kernel() if is_int8 else takes(weight)):
        return False
    others = (bias,) if is_int8 else (weight, bias)
    alike = all(other is None or (other.dtype, other.device) == (x.dtype, x.device) for other in others)
    return alike and not torch.is_grad_enabled() and not torch.is_autocast_enabled(DEVICE)


@functools.cache
def has_kernel() -> bool:
    built: Any = build_info()["native_cuda"]
    return "missing" not in built
