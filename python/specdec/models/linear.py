"""Linear layers by kernels of our own: of float32 on a CPU (csrc/cpu/linear.cpp), of 16 bits on a GPU (``product``)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import nn

from specdec_kernels import Packing, build_info, linear, linears

from .copied_modules import with_modules
from .product import DEVICE, DTYPES, product, takes

M = TypeVar("M", bound=nn.Module)
BESIDE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


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


class Beside:
    """Layers of one module that usually are called with the same tensor, one after the other: the first call computes
    all of them, in one operation."""

    def __init__(self, layers: Sequence[NativeLinear]):
        self._layers, self._x = [*layers], cast(torch.Tensor | None, None)
        self._results: dict[int, torch.Tensor] = {}

    def take(self, layer: NativeLinear, x: torch.Tensor) -> torch.Tensor:
        if x is not self._x or id(layer) not in self._results:
            layers = self._layers
            weights, packings = [own.weight for own in layers], [own.packing for own in layers]
            found = linears(x, weights, [own.bias for own in layers], packings)
            self._x, self._results = x, {id(own): y for own, y in zip(layers, found, strict=True)}
        y = self._results.pop(id(layer))
        if not self._results:  # nothing is kept from step to step
            self._x = None
        return y


def with_native_linear(model: M) -> M:
    """Returns ``model`` with every layer that is an ``nn.Linear`` and no more as a :class:`NativeLinear`, if it is of
    float32 on a CPU or :func:`.product.takes` its weights, and with copies of those that are such already; ``model``
    itself if there is neither, or no native code.

    Layers beside each other (``BESIDE``) are computed in one operation. The model is not changed; see
    :func:`.copied_modules.with_modules`.
    """
    if not has_native():
        return model
    native = with_modules(model, _as_native)
    for module in native.modules():
        for names in BESIDE:
            found = [layer for name in names if isinstance(layer := module._modules.get(name), NativeLinear)]
            if len(found) == len(names) and len({layer.in_features for layer in found}) == 1:
                beside = Beside(found)
                for layer in found:
                    vars(layer)["beside"] = beside
    return native


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
