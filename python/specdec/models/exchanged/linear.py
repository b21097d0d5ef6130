"""Linear layers by kernels of our own: of float32 on a CPU (csrc/layers/cpu/linear.cpp), of 16 bits on a GPU
(``product``)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, TypeGuard, TypeVar, cast

import torch
from specdec_layers import Packing, build_info, linear, linears
from torch import nn

from .beside import Beside, beside_in
from .copied_modules import with_modules
from .native_setting import is_wanted
from .product import DEVICE, DTYPES, deferred_product, product, takes

M = TypeVar("M", bound=nn.Module)


class NativeLinear(nn.Linear):
    """What ``nn.Linear`` computes, faster for the few tokens of a step, and the result of a token does not depend on
    the number of the others. It shares the weights, hooks and all else of the layer that it stands for. Its weights may
    be stored as bfloat16 or in blocks (``packed_weights``), which changes no result."""

    packing = Packing.NONE

    def weight_as(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the numbers [outputs, inputs] that its weights stand for."""
        return self.weight.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_ours(x) or torch.is_autocast_enabled("cpu"):
            return product(x, self.weight_as(x.dtype), self.bias)
        beside = vars(self).get("beside")
        if beside is not None and x.dim() == 3:
            return beside.take(self, x)
        rows = x if x.dim() == 3 else x.reshape(1, -1, self.in_features)
        return linear(rows, self.weight, self.bias, self.packing).view(*x.shape[:-1], self.out_features)


class LastLinear(NativeLinear):
    """The last layer of a branch, whose product is left to the sum that follows where that can compute it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._forward_hooks or is_ours(x) or self.packing != Packing.NONE or self.weight.dtype != x.dtype:
            return super().forward(x)
        return deferred_product(x, self.weight, self.bias)


def with_native_linear(model: M) -> M:
    """Returns ``model`` with every layer that is an ``nn.Linear`` and no more as a :class:`NativeLinear`, if it is of
    float32 on a CPU or :func:`.product.takes` its weights, and with copies of those that are such already; ``model``
    itself if there is neither, or no native code.

    Layers beside each other are computed in one operation. The model is not changed; see
    :func:`.copied_modules.with_modules`.
    """
    if not has_native() or not is_wanted():
        return model
    native = with_modules(model, _as_native)
    for module in native.modules():
        for layers in beside_in(module):
            if all(isinstance(layer, NativeLinear) for layer in layers):
                Beside(layers, functools.partial(_together, layers))
    return native


def _together(layers: Sequence[nn.Linear], x: torch.Tensor) -> Sequence[torch.Tensor]:
    weights, packings = [own.weight for own in layers], [cast(NativeLinear, own).packing for own in layers]
    return linears(x, weights, [own.bias for own in layers], packings)


@functools.cache
def has_native() -> bool:
    native: Any = build_info()["native"]
    return "missing" not in native


def is_ours(x: torch.Tensor) -> bool:
    """Whether operations of our own compute with what a module is given: float32 on a CPU, without gradients."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_grad_enabled()


def is_native(model: nn.Module) -> bool:
    """Whether all weights that ``model`` multiplies by are those of native layers."""
    modules = [m for m in model.modules() if any(p is not None and p.dim() > 1 for p in m._parameters.values())]
    return has_native() and all(isinstance(module, NativeLinear | nn.Embedding) for module in modules)


def _as_native(layer: nn.Module) -> nn.Module | None:
    if isinstance(layer, NativeLinear):
        return copy.copy(layer)
    on_gpu = is_plain(layer, *DTYPES, device=DEVICE) and takes(layer.weight)
    if not on_gpu and not is_plain(layer, torch.float32):
        return None
    fast = copy.copy(layer)
    fast.__class__ = NativeLinear
    return fast


def is_plain(module: nn.Module, *dtypes: torch.dtype, device: str = "cpu") -> TypeGuard[nn.Linear]:
    """Whether it is an ``nn.Linear`` of one of these dtypes on such a device: not a subclass, quantised, or with a
    forward that was replaced."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight = module.weight
    stored = type(weight) is nn.Parameter and weight.device.type == device and weight.is_contiguous()
    return stored and weight.dtype in dtypes
