"""Linear layers on a CPU for the few tokens of a step. Their kernel reads every weight once (csrc/cpu/linear.cpp)."""

from __future__ import annotations

import copy
import functools
from typing import Any, TypeVar

import torch
from torch import nn

from specdec_kernels import build_info, linear

from .copied_modules import with_modules

MOST_ROWS = 8  # from about twelve tokens on, torch's own product is faster

M = TypeVar("M", bound=nn.Module)


class FewRowsLinear(nn.Linear):
    """What ``nn.Linear`` computes, faster for up to ``MOST_ROWS`` tokens, where the result of a token does not depend
    on the number of the others. It shares the weights, hooks and all else of the layer that it stands for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = x.dim() == 3 and x.dtype == torch.float32
        if not taken or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        return linear(x, self.weight, self.bias, most_rows=MOST_ROWS)


def with_few_rows(model: M) -> M:
    """Returns ``model`` with every float32 layer on a CPU that is an ``nn.Linear`` and no more as a
    :class:`FewRowsLinear`; ``model`` itself if there is none, or no native code.

    The model is not changed; see :func:`.copied_modules.with_modules`.
    """
    return with_modules(model, _as_few_rows) if _has_native() else model


@functools.cache
def _has_native() -> bool:
    native: Any = build_info()["native"]
    return "missing" not in native


def _as_few_rows(layer: nn.Module) -> nn.Module | None:
    if not _is_plain(layer):
        return None
    fast = copy.copy(layer)
    fast.__class__ = FewRowsLinear
    return fast


def _is_plain(module: nn.Module) -> bool:
    """Not a subclass, quantised, or with a forward that was replaced."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight = module.weight
    return (
        type(weight) is nn.Parameter
        and (weight.device.type, weight.dtype) == ("cpu", torch.float32)
        and weight.is_contiguous()
    )
