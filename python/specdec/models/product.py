"""Products of linear layers on a GPU: of few rows by a kernel of our own (csrc/cuda/linear.h), of more by PyTorch.

The kernel computes the norm before a product, a gate or a sum after it on its way. Norms and products that it can take
so are deferred."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional as F

from specdec_kernels import add_linear, build_info, linear, norm_linear

from .deferred import Deferred, computed, source_of

# Two tiles of the kernel. For a layer of an 8B model, an H200 took 7 % less time by a sketch of it than by cuBLAS with
# one row, 4 % less with 8 and 27 % more with 40, and nothing was measured in between (docs/cuda.md).
MOST_ROWS = 16
DTYPES = (torch.bfloat16, torch.float16)
UNIT = 32  # of whose multiple the kernel takes inputs
DEVICE = "cuda"


class Norm(NamedTuple):
    """RMSNorm of ``x`` that is still to be computed, as :func:`specdec_kernels.rms_norm` takes it."""

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
    keeps it."""
    if (y := _of_norm(x, weight, bias)) is not None:
        return y
    x = computed(x)
    if not _computes(x, weight, bias):
        return F.linear(x, weight, bias)
    return linear(_rows(x), weight, bias).view(*x.shape[:-1], weight.shape[0])


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
    if not _computes(x := computed(x), weight, bias):
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


def _suits(x: torch.Tensor) -> bool:
    """Whether the kernel computes with these numbers, and so many rows."""
    few = x.device.type == DEVICE and x.numel() <= MOST_ROWS * x.shape[-1] and x.dtype in DTYPES
    return few and has_kernel() and not torch.is_grad_enabled() and not torch.is_autocast_enabled(DEVICE)


def _computes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    alike = all(other is None or (other.dtype, other.device) == (x.dtype, x.device) for other in (weight, bias))
    return alike and _suits(x) and takes(weight)


@functools.cache
def has_kernel() -> bool:
    built: Any = build_info()["native_cuda"]
    return "missing" not in built
