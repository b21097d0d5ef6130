"""What stands between the products of a decoder layer, of a GPU's step: ``rms_norm``, alone and after an addition,
``rotate`` and ``gated``, and ``rope_angles`` once a forward, each in one launch where PyTorch takes five to nine. What
transformers' modules round to the dtype of their numbers is rounded here, too."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ... import ops
from .launch import contiguous, dense_rows, device_guard
from .recurrent import floats

_NUMBERS = 1024  # of a gated layer in a program


@triton.jit
def rounded(x, ptr):
    """``x`` as numbers of the dtype that is stored at ``ptr``."""
    return x.to(ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def normed(
    x,
    weight_ptr,
    column,
    inside,
    size,
    y_ptr,
    EPSILON: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    """RMSNorm of a row of float32 numbers."""
    y = x / tl.sqrt(tl.sum(x * x, 0) / size + EPSILON)
    if weight_ptr is not None:
        y = (rounded(y, y_ptr) if ROUND_FIRST else y) * (floats(weight_ptr, column, inside) + OFFSET)
    return y


@triton.jit(do_not_specialize=["size", "inner", "outer_stride", "inner_stride"])
def rms_norm_kernel(
    x_ptr,  # [rows / inner, inner, size], by strides
    weight_ptr,  # [size], or None
    y_ptr,  # [rows, size]
    size,
    inner,
    outer_stride,
    inner_stride,
    EPSILON: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
):
    column = tl.arange(0, WIDTH)
    row, inside = tl.program_id(0).to(tl.int64), column < size
    x = floats(x_ptr, row // inner * outer_stride + row % inner * inner_stride + column, inside)
    y = normed(x, weight_ptr, column, inside, size, y_ptr, EPSILON, OFFSET, ROUND_FIRST)
    tl.store(y_ptr + row * size + column, y, mask=inside)


@triton.jit(do_not_specialize=["size"])
def add_rms_norm_kernel(
    x_ptr,  # [rows, size]
    delta_ptr,  # [rows, size]
    weight_ptr,  # [size], or None
    delta_weight_ptr,  # [size], or None: delta has no norm of its own
    sum_ptr,  # [rows, size]
    y_ptr,  # [rows, size]
    size,
    EPSILON: tl.constexpr,
    DELTA_EPSILON: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
):
    column = tl.arange(0, WIDTH)
    at, inside = tl.program_id(0).to(tl.int64) * size + column, column < size
    delta = floats(delta_ptr, at, inside)
    if delta_weight_ptr is not None:
        delta = normed(delta, delta_weight_ptr, column, inside, size, y_ptr, DELTA_EPSILON, OFFSET, ROUND_FIRST)
        delta = rounded(delta, y_ptr)
    x = rounded(floats(x_ptr, at, inside) + delta, y_ptr)
    tl.store(sum_ptr + at, x, mask=inside)
    tl.store(y_ptr + at, normed(x, weight_ptr, column, inside, size, y_ptr, EPSILON, OFFSET, ROUND_FIRST), mask=inside)


@triton.jit(do_not_specialize=["row_stride", "head_stride", "token_stride", "angle_stride"])
def rotate_kernel(
    x_ptr,  # [rows, heads, tokens, 2 HALF], by strides
    cos_ptr,  # [rows or 1, tokens, 2 HALF]
    sin_ptr,
    y_ptr,  # [rows, heads, tokens, 2 HALF]
    row_stride,
    head_stride,
    token_stride,
    angle_stride,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token, head, row = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    tokens, heads = tl.num_programs(0), tl.num_programs(1)
    first = tl.arange(0, WIDTH)
    inside, second = first < HALF, first + HALF
    x = x_ptr + row * row_stride + head * head_stride + token * token_stride
    a, b = floats(x, first, inside), floats(x, second, inside)
    angle = row * angle_stride + token * 2 * HALF
    y = y_ptr + ((row * heads + head) * tokens + token) * 2 * HALF
    cos, sin = floats(cos_ptr, angle + first, inside), floats(sin_ptr, angle + first, inside)
    tl.store(y + first, rounded(a * cos, y_ptr) - rounded(b * sin, y_ptr), mask=inside)
    cos, sin = floats(cos_ptr, angle + second, inside), floats(sin_ptr, angle + second, inside)
    tl.store(y + second, rounded(b * cos, y_ptr) + rounded(a * sin, y_ptr), mask=inside)


@triton.jit(do_not_specialize=["row_stride"])
def rope_angles_kernel(
    positions_ptr,  # [rows, tokens], by rows
    frequencies_ptr,  # [HALF]
    cos_ptr,  # [rows, tokens, 2 HALF]
    sin_ptr,
    row_stride,
    SCALE: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, WIDTH)
    inside = i < HALF
    position = tl.load(positions_ptr + row * row_stride + token).to(tl.float32)
    angle = position * floats(frequencies_ptr, i, inside)
    cos, sin = tl.cos(angle) * SCALE, tl.sin(angle) * SCALE
    at = (row * tl.num_programs(0) + token) * 2 * HALF + i
    tl.store(cos_ptr + at, cos, mask=inside)
    tl.store(cos_ptr + at + HALF, cos, mask=inside)
    tl.store(sin_ptr + at, sin, mask=inside)
    tl.store(sin_ptr + at + HALF, sin, mask=inside)


@triton.jit(do_not_specialize=["size", "gate_stride", "up_stride"])
def gated_kernel(
    gate_ptr,  # [rows, size], by strides
    up_ptr,
    y_ptr,  # [rows, size]
    size,
    gate_stride,
    up_stride,
    GELU: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    inside = column < size
    gate = floats(gate_ptr, row * gate_stride + column, inside)
    up = floats(up_ptr, row * up_stride + column, inside)
    # GELU's (1 + tanh(z)) / 2 is the logistic function of 2 z.
    z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    tl.store(y_ptr + row * size + column, rounded(gate / (1.0 + tl.exp(-z)), y_ptr) * up, mask=inside)


def _require(tensor: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor, name: str) -> None:
    if tuple(tensor.shape) != shape or (tensor.dtype, tensor.device) != (like.dtype, like.device):
        raise RuntimeError(f"specdec_layers: {name} has a wrong shape, dtype or device")


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, offset: float, round_first: bool
) -> torch.Tensor:
    size = x.shape[-1]
    if weight is not None:
        _require(weight, (size,), x, "weight")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inner = x.shape[-2] if x.dim() > 1 else 1
    x = dense_rows(x.reshape(math.prod(x.shape[:-2]), inner, size))
    with device_guard(x):
        rms_norm_kernel[y.numel() // size,](
            x, contiguous(weight), y, size, inner, *x.stride()[:2],
            EPSILON=epsilon, OFFSET=offset, ROUND_FIRST=round_first, **_of_rows(size),
        )  # fmt: skip
    return y


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    offset: float,
    round_first: bool,
    delta_weight: torch.Tensor | None,
    delta_epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    size = x.shape[-1]
    _require(delta, tuple(x.shape), x, "delta")
    for name, own in (("weight", weight), ("delta_weight", delta_weight)):
        if own is not None:
            _require(own, (size,), x, name)
    x = x.contiguous()
    total, y = torch.empty_like(x), torch.empty_like(x)
    with device_guard(x):
        add_rms_norm_kernel[x.numel() // size,](
            x, delta.contiguous(), contiguous(weight), contiguous(delta_weight), total, y, size,
            EPSILON=epsilon, DELTA_EPSILON=delta_epsilon, OFFSET=offset, ROUND_FIRST=round_first, **_of_rows(size),
        )  # fmt: skip
    return total, y


def _of_rows(size: int) -> dict[str, Any]:
    """How kernels are launched that take a row at once. Both norms add up in the same order, and no product is fused
    with a sum, so that they have the same bits."""
    width = triton.next_power_of_2(size)
    return {"WIDTH": width, "num_warps": min(max(width // 256, 1), 16), "enable_fp_fusion": False}


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rows, heads, tokens, size = x.shape
    for name, angles in (("cos", cos), ("sin", sin)):
        _require(angles, (1 if cos.shape[0] == 1 else rows, tokens, size), x, name)
    x = dense_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    angle_stride = 0 if cos.shape[0] == 1 else tokens * size
    with device_guard(x):
        # A product that is fused with a sum would not be rounded.
        rotate_kernel[tokens, heads, rows](
            x, cos.contiguous(), sin.contiguous(), y, *x.stride()[:3], angle_stride,
            HALF=size // 2, WIDTH=triton.next_power_of_2(size // 2), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def rope_angles(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    if positions.dim() != 2 or positions.dtype != torch.int64:
        raise RuntimeError("specdec_layers: positions has a wrong shape or dtype")
    if frequencies.dim() != 1 or frequencies.device != positions.device:
        raise RuntimeError("specdec_layers: frequencies has a wrong shape or device")
    (rows, tokens), half = positions.shape, frequencies.shape[0]
    cos, sin = (torch.empty(rows, tokens, 2 * half, dtype=dtype, device=positions.device) for _ in range(2))
    positions, frequencies = dense_rows(positions), frequencies.contiguous()
    if cos.numel() == 0:
        return cos, sin
    with device_guard(positions):
        rope_angles_kernel[tokens, rows](
            positions, frequencies, cos, sin, positions.stride(0),
            SCALE=scale, HALF=half, WIDTH=triton.next_power_of_2(half), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return cos, sin


def gated(gate: torch.Tensor, up: torch.Tensor, gelu: bool) -> torch.Tensor:
    _require(up, tuple(gate.shape), gate, "up")
    y, size = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device), gate.shape[-1]
    rows = math.prod(gate.shape[:-1])
    gate, up = (dense_rows(part.reshape(rows, size)) for part in (gate, up))
    with device_guard(gate):
        gated_kernel[rows, triton.cdiv(size, _NUMBERS)](
            gate, up, y, size, gate.stride(0), up.stride(0), GELU=gelu, NUMBERS=_NUMBERS, num_warps=4
        )
    return y


ops.implement("rms_norm_triton", rms_norm)
ops.implement("add_rms_norm_triton", add_rms_norm)
ops.implement("rotate_triton", rotate)
ops.implement("rope_angles_triton", rope_angles)
ops.implement("gated_triton", gated)
