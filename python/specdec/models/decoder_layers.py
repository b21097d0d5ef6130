"""Decoder layers whose residual additions are computed together with the norms that follow them, in one launch on a
GPU: within a layer, and from a layer to the next one or to the model's last norm."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn

from specdec_kernels import add_rms_norm

from .ahead import keep_norm, take_norm
from .branches import Branches, branches_of
from .copied_modules import reclass, with_modules
from .native_parts import NativeRMSNorm

M = TypeVar("M", bound=nn.Module)


class NativeLayer:
    """Of a decoder layer that consists of branches, each of which begins with a native norm.

    Attributes:
        next_norm: the norm that usually is given what the layer returns.
    """

    branches: Branches
    next_norm: NativeRMSNorm | None = None

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ours = self.branches.first_norm(self).computes(hidden_states) and self.branches.take(kwargs)
        if not ours or args or self.training or self._forward_pre_hooks:
            take_norm(hidden_states, None)
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        # A hook may change in place what the layer returns.
        following = None if self._forward_hooks else self.next_norm
        return self.branches.run(self, hidden_states, kwargs, following, _sum)


def with_native_layers(model: M, device: str = "cuda") -> M:
    """Returns ``model``, whose norms are native, with the decoder layers that are recognised; ``model`` itself if there
    is none, or if it is not on a device of this type. (On a CPU an addition is no launch.) The model is not changed;
    see :func:`.copied_modules.with_modules`."""
    if any(parameter.device.type != device for parameter in model.parameters()):
        return model
    native = with_modules(model, _as_native)
    for parent in native.modules():
        norms = [child for child in parent._modules.values() if isinstance(child, NativeRMSNorm)]
        last = norms[0] if len(norms) == 1 else None  # a guess: what is computed for another norm is not taken
        for layers in (child for child in parent._modules.values() if isinstance(child, nn.ModuleList)):
            own: list[Any] = [layer if isinstance(layer, NativeLayer) else None for layer in layers]
            firsts = [layer and layer.branches.first_norm(layer) for layer in own]
            for layer, norm in zip(own, [*firsts[1:], last], strict=True):
                if layer is not None:
                    vars(layer)["next_norm"] = norm  # it is no module of the layer's own
    return native


def _as_native(layer: nn.Module) -> nn.Module | None:
    norms = {name for name, child in layer._modules.items() if isinstance(child, NativeRMSNorm)}
    branches = branches_of(layer, norms) if norms and "forward" not in vars(layer) else None
    if branches is None:
        return None
    fast = copy.copy(layer)
    reclass(fast, NativeLayer, branches=branches)
    return fast


def _sum(x: torch.Tensor, delta: torch.Tensor, after: Any, following: Any) -> torch.Tensor:
    """Returns ``x + after(delta)``, which keeps its norm by ``following``."""
    fits = following is not None and following.computes(x) and (delta.shape, delta.dtype) == (x.shape, x.dtype)
    delta_weight, delta_epsilon = None, 0.0
    if fits and _joins(after, delta, following):
        delta_weight, delta_epsilon = after.numbers()
    elif after is not None:
        delta = after(delta)
    if not fits:
        return x + delta
    own = {**following.form(), "delta_weight": delta_weight, "delta_epsilon": delta_epsilon}
    total, normed = add_rms_norm(x, delta, *following.numbers(), **own)
    keep_norm(total, following, normed)
    return total


def _joins(after: Any, delta: torch.Tensor, following: Any) -> bool:
    """Whether the norm of what is added can be computed with the one that follows: nobody else's code may expect to run
    when it is called."""
    if not isinstance(after, NativeRMSNorm) or not after.computes(delta) or after.numbers()[0] is None:
        return False
    module: Any = after
    return after.form() == following.form() and not module._forward_hooks and not module._forward_pre_hooks
