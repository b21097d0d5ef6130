"""Norms and rotary embeddings of a model on a CPU, by operations of our own (csrc/cpu/elementwise.cpp).

What a module or a function computes is found by trying it: one that gives what our operation gives, for numbers of many
sizes, is exchanged, whatever its code is.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from specdec_kernels import rms_norm, rotate

from .copied_modules import reclass, with_globals, with_modules
from .linear import has_native

M = TypeVar("M", bound=nn.Module)
ROTARY = "apply_rotary_pos_emb"
_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_SIZE = 64  # of what is tried


class NativeRMSNorm:
    """Of a module that computes RMSNorm of float32."""

    offset: float
    epsilon_name: str

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weight = getattr(self, "weight", None)
        if x.dtype != torch.float32 or torch.is_grad_enabled() or (weight is not None and weight.dtype != x.dtype):
            return super().forward(x)  # type: ignore[misc]
        return rms_norm(x, weight, getattr(self, self.epsilon_name), offset=self.offset)


def with_native_parts(model: M) -> M:
    """Returns ``model`` with the norms and rotary embeddings that are recognised; ``model`` itself if there is none, or
    no native code. The model is not changed; see :func:`.copied_modules.with_modules`."""
    if not has_native():
        return model
    rotated = with_modules(model, _with_rotation)
    return with_modules(rotated, _norm)


def _norm(module: nn.Module) -> nn.Module | None:
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    names = [name for name in _EPSILONS if isinstance(vars(module).get(name), float)]
    if len(names) != 1 or module._modules or not parameters.keys() <= {"weight"} or "forward" in vars(module):
        return None
    weight = parameters.get("weight")
    if weight is not None and (weight.device.type, weight.dtype, weight.dim()) != ("cpu", torch.float32, 1):
        return None
    kind: Any = type(module)
    offset = _offset_of(kind, names[0], weight is not None)
    if offset is None:
        return None
    fast = copy.copy(module)
    reclass(fast, NativeRMSNorm, offset=offset, epsilon_name=names[0])
    return fast


@functools.cache
def _offset_of(kind: Any, epsilon: str, weighted: bool) -> float | None:
    """Returns what a class adds to its weights; None: it does not compute RMSNorm."""
    if [*inspect.signature(kind.forward).parameters][2:]:
        return None
    tried = kind.__new__(kind)
    nn.Module.__init__(tried)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_SIZE, generator=generator)
    if weighted:
        tried.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    setattr(tried, epsilon, 1e-3)
    x = torch.randn(8, _SIZE, generator=generator) * torch.logspace(-3, 4, 8)[:, None]
    try:
        found = tried(x)
    except Exception:  # other classes need what this one was not given
        return None
    for offset in (0.0, 1.0) if weighted else (0.0,):
        own = rms_norm(x, weight if weighted else None, 1e-3, offset=offset)
        if found.dtype == own.dtype and found.shape == own.shape and torch.allclose(found, own, rtol=1e-5, atol=1e-6):
            return offset
    return None


def _with_rotation(module: nn.Module) -> nn.Module | None:
    forward: Any = inspect.unwrap(type(module).forward)
    if "forward" in vars(module) or ROTARY not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return None
    function = forward.__globals__.get(ROTARY)
    if not _rotates(function):
        return None
    fast = copy.copy(module)
    reclass(fast, forward=with_globals(forward, {ROTARY: _rotary(function)}))
    return fast


@functools.cache
def _rotary(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what computes ``function`` by our operation where it can."""

    def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any):
        plain = not args and not kwargs and not torch.is_grad_enabled() and q.dim() == 4 and cos.dim() == 3
        of_float32 = all(x.dtype == torch.float32 and x.device.type == "cpu" for x in (q, k, cos, sin))
        if not plain or not of_float32 or cos.shape[-1] != q.shape[-1]:
            return function(q, k, cos, sin, *args, **kwargs)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    return rotary


@functools.cache
def _rotates(function: Any) -> bool:
    """Whether a function turns q and k as :func:`specdec_kernels.rotate` does."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 3, _SIZE, generator=generator) for heads in (4, 2))
    cos, sin = (torch.randn(2, 3, _SIZE, generator=generator) for _ in range(2))
    try:
        found = function(q, k, cos, sin)
    except Exception:  # others take other arguments
        return False
    own = rotate(q, cos, sin), rotate(k, cos, sin)
    return len(found) == 2 and all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, own, strict=True))
