"""Gives the recurrent layers of a model a state that can be rolled back.

transformers' recurrent layers all have one form: a projection, a short convolution whose past the cache keeps, a scan
over the tokens by a function of the layer's file, a norm and a projection. Here the convolution and the scan are
exchanged for those of :mod:`.recurrent_layer`, by the names that the layer's ``forward`` calls them by; all else stays
the model's own code, with its own modules.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache.recurrent_layer import RecurrentLayer
from ..exchanged.copied_modules import reclass, with_globals, with_modules

CONVOLUTION = "causal_conv1d_fn"
# Each function's arguments are transformers', of which those that only say how to compute are left out.
Bound = Callable[..., Any]


class _Seam:
    """The layer of the cache that a forward uses, and what the module's ``forward`` calls instead of its functions."""

    def __init__(self) -> None:
        self.layer = cast(RecurrentLayer, None)

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias=None, activation=None, **others):
        return self.layer.convolve(x, weight, bias, activation)

    def delta_rule(self, query, key, value, g, beta, use_qk_l2norm_in_kernel=False, **others):
        """The gated delta rule, with a decay for each head or each channel."""
        out = self.layer.delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel)
        return out.to(query.dtype), self._state()

    def mamba2(self, x, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, float("inf")), **others):
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = nn.functional.softplus(dt) if dt_softplus else dt
        # Some models bound dt where they read prompts, and not where they decode token by token.
        dt = dt.clamp(*dt_limit) if self.layer.feed.keep else dt
        return self.layer.state_space(x, dt, B, C, A, D), self._state()

    def mamba1(self, x, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, **others):
        """Every channel is a head of one number. x, dt: [n, C, q]; B, C: [n, N, q]."""
        dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
        dt = nn.functional.softplus(dt) if delta_softplus else dt
        B, C = (b.transpose(1, 2)[:, :, None] for b in (B, C))
        y = self.layer.state_space(x.transpose(1, 2)[..., None], dt.transpose(1, 2), B, C, A, D)
        y = y[..., 0].transpose(1, 2)
        return (y if z is None else y * nn.functional.silu(z)), self._state()

    def _state(self) -> torch.Tensor:
        """What the module hands to ``update_recurrent_state``."""
        assert self.layer.state is not None
        return self.layer.state.state


SCANS: dict[str, Callable[[_Seam], Bound]] = {
    "torch_chunk_gated_delta_rule": lambda seam: seam.delta_rule,
    "chunk_kimi_delta_attention": lambda seam: seam.delta_rule,
    "mamba2_chunk_scan": lambda seam: seam.mamba2,
    "mamba_selective_scan": lambda seam: seam.mamba1,
}


def recurrent_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Returns the modules of ``model`` that :func:`with_recurrence` exchanges, by the number of their layer."""
    found = {}
    for module in model.modules():
        if {CONVOLUTION, "update_conv_state"} <= {*_names(module)}:
            found[cast(int, module.layer_idx)] = module
    return found


def scan_of(module: nn.Module) -> str | None:
    """Returns the name of the scan that a recurrent layer calls, "" if it is a convolution alone; None: it has a state,
    and no scan that is known here."""
    names = _names(module)
    scans = [name for name in SCANS if name in names]
    return scans[0] if scans else None if "update_recurrent_state" in names else ""


def with_recurrence(model: PreTrainedModel) -> PreTrainedModel:
    """Returns ``model`` with recurrent layers whose forwards over a static cache can be rolled back; ``model`` itself
    if it has none. The model is not changed; see :func:`~specdec.models.exchanged.copied_modules.with_modules`."""
    own = {id(module) for module in recurrent_layers(model).values()}
    return with_modules(model, lambda module: _exchanged(module) if id(module) in own else None)


def _names(module: nn.Module) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def _exchanged(module: nn.Module) -> nn.Module:
    """A copy of ``module`` whose forward, the same code, finds other functions under the names of two of its own."""
    original, seam = inspect.unwrap(type(module).forward), _Seam()
    functions: dict[str, Bound] = {CONVOLUTION: seam.convolve}
    if scan := scan_of(module):
        functions[scan] = SCANS[scan](seam)
    forward = with_globals(original, functions)
    index = cast(int, module.layer_idx)

    def over_its_layer(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cache = next(value for value in (*args, *kwargs.values()) if isinstance(value, Cache))
        seam.layer = cast(RecurrentLayer, cache.layers[index])
        return forward(self, *args, **kwargs)

    copied = copy.copy(module)
    reclass(copied, forward=over_its_layer)
    return copied
