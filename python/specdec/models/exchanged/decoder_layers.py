"""Decoder layers in which what stands between the products is computed together with other things, in fewer launches on
a GPU: residual additions with the norms that follow, in a layer and from one to the next (``norms``); and of few tokens
norms, gates and additions by the products themselves (``product``)."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn

from .branches import Branch, Branches, branches_of
from .copied_modules import reclass, with_modules
from .deferred import computed
from .int8_linear import Int8Linear, LastInt8Linear
from .linear import LastLinear, NativeLinear
from .merged import MergedLinear
from .norms import NativeRMSNorm, deferred_sum, passes

M = TypeVar("M", bound=nn.Module)
_LAST = ("o_proj", "down_proj")  # as transformers names what ends a branch
_AS_LAST: dict[type, type] = {NativeLinear: LastLinear, Int8Linear: LastInt8Linear}


class NativeLayer:
    """Of a decoder layer that consists of branches, each of which begins with a native norm.

    Attributes:
        defers: the names of those norms that may be left to the products that follow.
    """

    branches: Branches
    defers: frozenset[str]

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ours = self.branches.first_norm(self).computes(hidden_states) and self.branches.take(kwargs)
        if not ours or args or self.training or self._forward_pre_hooks:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        y = self.branches.run(self, hidden_states, kwargs, self._normed, deferred_sum)
        return computed(y) if self._forward_hooks else y  # which may change in place what was given

    def _normed(self: Any, part: Branch, x: torch.Tensor) -> torch.Tensor:
        norm = self._modules[part.norm]
        return norm.before(x) if part.norm in self.defers else norm(x)


def with_native_layers(model: M, device: str = "cuda") -> M:
    """Returns ``model``, whose norms are native, with the decoder layers that are recognised; ``model`` itself if there
    is none, or if it is not on a device of this type. (On a CPU an addition is no launch.) The model is not changed;
    see :func:`.copied_modules.with_modules`."""
    if any(parameter.device.type != device for parameter in model.parameters()):
        return model
    return with_modules(model, _as_native)


def _as_native(layer: nn.Module) -> nn.Module | None:
    norms = {name for name, child in layer._modules.items() if isinstance(child, NativeRMSNorm)}
    branches = branches_of(layer, norms) if norms and "forward" not in vars(layer) else None
    if branches is None:
        return None
    ours = [part for part in branches.parts if _is_ours(layer._modules[part.module])]
    afters = {part.module: layer._modules.get(part.after or "") for part in ours}
    ends = {id(layer._modules[name]) for name, after in afters.items() if after is None or passes(after)}
    fast = copy.copy(with_modules(layer, lambda module: _with_last(module) if id(module) in ends else None))
    reclass(fast, NativeLayer, branches=branches, defers=frozenset(part.norm for part in ours))
    return fast


def _is_ours(module: nn.Module | None) -> bool:
    """Whether all weights of a module are those of layers of ours: others may read tensors in ways of their own, by
    which they would not find out that one is deferred."""
    assert module is not None
    own = [m for m in module.modules() if m._parameters or m._buffers]
    return all(isinstance(m, NativeLinear | MergedLinear | Int8Linear | NativeRMSNorm) for m in own)


def _with_last(module: nn.Module) -> nn.Module:
    """Returns a module that ends a branch, with its last layer as such."""
    fast = copy.copy(module)
    fast._modules = dict(module._modules)
    for name in _LAST:
        layer = module._modules.get(name)
        if layer is not None and type(layer) in _AS_LAST:
            layer = copy.copy(layer)
            layer.__class__ = _AS_LAST[type(layer)]
            fast._modules[name] = layer
    return fast
