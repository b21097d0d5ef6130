"""Products of linear layers on a GPU: of few rows by a kernel of our own (csrc/layers/cuda/linear.h), of more by
PyTorch.

The kernel computes the norm before a product, a gate or a sum after it on its way. Norms and products that it can take
so are deferred."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from specdec_layers import Packing, add_linear, build_info, linear, norm_linear, unpack_int8
from torch.nn import functional as F

from .deferred import Deferred, computed, source_of

# Two tiles of the kernel. For a layer of an 8B model, an H200 took 7 % less time by a sketch of it than by cuBLAS with
# one row, 4 % less with 8 and 27 % more with 40, and nothing was measured in between (docs/cuda.md).
MOST_ROWS = 16
# Weights of 8 bits would have to be expanded for cuBLAS, which takes three times the bytes that 16 bits take. 64 rows
# have 240 instructions a kilobyte of weights, where an H100 can issue about 300 while it arrives; not measured yet.
MOST_ROWS_INT8 = 64
EXPANDED = 64 << 20  # bytes of weights that are expanded at a time
ROWS_INT8 = 8  # of packed weights, which lie together
DTYPES = (torch.bfloat16, torch.float16)
UNIT = 32  # of whose multiple the kernel takes inputs
DEVICE = "cuda"


class Norm(NamedTuple):
    """RMSNorm of ``x`` that is still to be computed, as :func:`specdec_layers.rms_norm` takes it."""

    x: torch.Tensor
    weight: torch.Tensor
    epsilon: float
    form: dict[str, Any]


class Product(NamedTuple):
    """``x weight^T + bias`` that is still to be computed."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns ``x weight^T + bias`` [..., outputs] of x [..., inputs], as ``torch.nn.functional.linear``. Where weights
    are such as the kernel takes, and there are up to ``MOST_ROWS`` rows, a row's result does not depend, to the last
    bit, on the others. Which of the two computes follows from shapes and dtypes alone, so a graph that was captured
    keeps it.

    Args:
        weight: [outputs, inputs] of a floating dtype, or uint8 as :func:`specdec_layers.pack_int8` returns it. By
            this the kernel multiplies up to ``MOST_ROWS_INT8`` rows.
    """
    if (y := _of_norm(x, weight, bias)) is not None:
        return y
    x = computed(x)
    is_int8 = weight.dtype == torch.uint8
    if not _computes(x, weight, bias):
        return _expanded(x, weight, bias) if is_int8 else F.linear(x, weight, bias)
    packing = Packing.INT8 if is_int8 else Packing.NONE
    return linear(_rows(x), weight, bias, packing).view(*x.shape[:-1], weight.shape[0])


def gated_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Literal["silu", "gelu_tanh"]
) -> torch.Tensor | None:
    """Returns ``activation(a) * b`` of the halves a and b of a product, if x is a norm that the kernel computes."""
    return _of_norm(x, weight, bias, activation)


def _of_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Any = None) -> Any:
    norm = source_of(x)
    if not isinstance(norm, Norm) or not _computes(norm.x, weight, bias):
        return None
    own = norm.weight, norm.epsilon, weight, bias
    y = norm_linear(_rows(norm.x), *own, **norm.form, activation=activation)
    return y.view(*x.shape[:-1], y.shape[-1])


def deferred_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, form: dict[str, Any], compute: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Returns ``compute()``, a norm of x: left to the products of it if the kernel can compute it."""
    if not _suits(x) or (weight.dtype, weight.device) != (x.dtype, x.device) or x.shape[-1] % UNIT:
        return compute()
    return Deferred.of(x, compute, Norm(x, weight, epsilon, form))


def deferred_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns :func:`product`, left to the sum that follows if the kernel can compute it."""
    if not _suits(x := computed(x)) or not _computes(x, weight, bias):
        return product(x, weight, bias)
    form = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return Deferred.of(form, functools.partial(product, x, weight, bias), Product(x, weight, bias))


def added_product(base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor | None:
    """Returns ``base + delta``, if delta is a product that the kernel computes."""
    made = source_of(delta)
    alike = (delta.shape, delta.dtype, delta.device) == (base.shape, base.dtype, base.device)
    if not isinstance(made, Product) or not alike or not _suits(base):
        return None
    return add_linear(_rows(base), _rows(made.x), made.weight, made.bias).view(base.shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 3 else x.reshape(1, -1, x.shape[-1])


def takes(weight: torch.Tensor) -> bool:
    """Whether the kernel multiplies by these weights [outputs, inputs], without a copy of them."""
    suits = weight.device.type == DEVICE and weight.dtype in DTYPES and weight.is_contiguous()
    return suits and weight.shape[1] % UNIT == 0 and weight.data_ptr() % 16 == 0 and has_kernel()


def _expanded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    outputs = max(EXPANDED // (ROWS_INT8 * x.shape[-1] * x.itemsize), 1) * ROWS_INT8
    biases = [None] * len(weight) if bias is None else bias.split(outputs)
    parts = zip(weight.split(outputs), biases, strict=False)
    return torch.cat([F.linear(x, unpack_int8(some, x.dtype), of) for some, of in parts], -1)


def _suits(x: torch.Tensor, most: int = MOST_ROWS) -> bool:
    """Whether the kernel computes with these numbers, and so many rows."""
    few = x.device.type == DEVICE and x.numel() <= most * x.shape[-1] and x.dtype in DTYPES
    return few and has_kernel() and not torch.is_grad_enabled() and not torch.is_autocast_enabled(DEVICE)


def _computes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    is_int8 = weight.dtype == torch.uint8
    others = [other for other in (None if is_int8 else weight, bias) if other is not None]
    alike = all((other.dtype, other.device) == (x.dtype, x.device) for other in others)
    return alike and (_suits(x, MOST_ROWS_INT8) if is_int8 else _suits(x) and takes(weight))


@functools.cache
def has_kernel() -> bool:
    built: Any = build_info()["native_cuda"]
    return "missing" not in built
