"""Linear layers with what a decoder layer has around them, in plain PyTorch: what the kernel is compared with."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..int8_rows import unpack_int8
from ..ops import implement


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
    offset: float,
    round_first: bool,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate: int,
) -> torch.Tensor:
    # What is added up in another order, as of other strides, would have other bits.
    _require(norm_weight, (x.shape[-1],), x, "norm_weight")
    wide = x.contiguous().to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    y = (y.to(x.dtype).to(wide.dtype) if round_first else y) * (norm_weight.to(wide.dtype) + offset)
    y = _linear(y.to(x.dtype), weight, bias)
    if not gate:
        return y
    first, second = y.chunk(2, -1)
    return (F.gelu(first, approximate="tanh") if gate == 2 else F.silu(first)) * second


def add_linear(base: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    _require(base, (*x.shape[:-1], weight.shape[0]), x, "base")
    return base + _linear(x, weight, bias)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if weight.dtype == torch.uint8:
        weight = unpack_int8(weight, x.dtype)
    _require(weight, (weight.shape[0], x.shape[-1]), x, "weight")
    if bias is not None:
        _require(bias, (weight.shape[0],), x, "bias")
    return F.linear(x.contiguous(), weight.contiguous(), bias)


def _require(tensor: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor, name: str) -> None:
    if tuple(tensor.shape) != shape or (tensor.dtype, tensor.device) != (like.dtype, like.device):
        raise RuntimeError(f"specdec_layers: {name} has a wrong shape, dtype or device")


implement("norm_linear_reference", norm_linear)
implement("add_linear_reference", add_linear)
