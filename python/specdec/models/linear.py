"""Linear layers on a CPU, by a kernel of our own (csrc/cpu/linear.cpp)."""

from __future__ import annotations

import copy
import functools
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from specdec_kernels import build_info, linear

from .copied_modules import with_modules

M = TypeVar("M", bound=nn.Module)


class NativeLinear(nn.Linear):
    """What ``nn.Linear`` computes of float32, faster for the few tokens of a step, and the result of a token does not
    depend on the number of the others. It shares the weights, hooks and all else of the layer that it stands for. Its
    weights may be stored as bfloat16, which changes no result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32 or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return F.linear(x, self.weight.to(x.dtype), self.bias)
        rows = x if x.dim() == 3 else x.reshape(1, -1, self.in_features)
        return linear(rows, self.weight, self.bias).view(*x.shape[:-1], self.out_features)


def with_native_linear(model: M) -> M:
    """Returns ``model`` with every float32 layer on a CPU that is an ``nn.Linear`` and no more as a
    :class:`NativeLinear`; ``model`` itself if there is none, or no native code.

    The model is not changed; see :func:`.copied_modules.with_modules`.
    """
    return with_modules(model, _as_native) if has_native() else model


@functools.cache
def has_native() -> bool:
    native: Any = build_info()["native"]
    return "missing" not in native


def _as_native(layer: nn.Module) -> nn.Module | None:
    if not is_plain(layer, torch.float32):
        return None
    fast = copy.copy(layer)
    fast.__class__ = NativeLinear
    return fast


def is_plain(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether it is an ``nn.Linear`` of this dtype on a CPU: not a subclass, quantised, or with a forward that was
    replaced."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight = module.weight
    return (
        type(weight) is nn.Parameter and (weight.device.type, weight.dtype) == ("cpu", dtype) and weight.is_contiguous()
    )
