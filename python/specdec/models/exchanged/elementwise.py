"""Norms, rotary embeddings and gated layers of a model, by operations of our own: on a CPU
(csrc/layers/cpu/elementwise.cpp), and of a step on a GPU by Triton.

What a module or a function computes is found by trying it: one that gives what our operation gives, for numbers of many
sizes, is exchanged, whatever its code is.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
from specdec_layers import MOST_ATTENDING, gated, rope_angles, rotate
from torch import nn
from torch.utils._triton import has_triton

from .copied_modules import reclass, with_globals, with_modules
from .deferred import deferred_rotation
from .linear import has_native
from .merged import gated_together
from .native_setting import is_wanted
from .norms import computes, native_norm

M = TypeVar("M", bound=nn.Module)
ROTARY = "apply_rotary_pos_emb"
_SIZE = 64  # of what is tried


def has_elementwise(device: str) -> bool:
    """Whether there are operations of our own for this type of device."""
    return has_native() and (device == "cpu" or (device == "cuda" and has_triton()))


def with_elementwise(model: M, defers: bool = False) -> M:
    """Returns ``model``, on a CPU or a GPU, with the norms, rotary embeddings and gated layers that are recognised;
    ``model`` itself if there is none, or no native code, by which they are recognised, or on a GPU no Triton, or if it
    is on another device. The model is not changed; see :func:`.copied_modules.with_modules`.

    Args:
        defers: rotations of few tokens are left to attention (``deferred.py``).
    """
    # Not all of these have weights, which would say where they are.
    devices = {parameter.device.type for parameter in model.parameters()}
    if len(devices) != 1 or not has_elementwise(devices.pop()) or not is_wanted():
        return model
    # What rotates has norms inside; norms, angles and gated layers have nothing inside that is exchanged as well.
    return with_modules(with_modules(model, functools.partial(_with_rotation, defers=defers)), _norm_angles_or_gated)


def _norm_angles_or_gated(module: nn.Module) -> nn.Module | None:
    found = (exchanged(module) for exchanged in (native_norm, _angles, _gated))
    return next((fast for fast in found if fast is not None), None)


def _with_rotation(module: nn.Module, defers: bool = False) -> nn.Module | None:
    forward: Any = inspect.unwrap(type(module).forward)
    if "forward" in vars(module) or ROTARY not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return None
    function = forward.__globals__.get(ROTARY)
    if not _rotates(function) and not (defers and _rotates(function, by_halves=True)):
        return None
    fast = copy.copy(module)
    rotary = _rotary(function) if _rotates(function) else function
    reclass(fast, forward=with_globals(forward, {ROTARY: _deferring(rotary, function) if defers else rotary}))
    return fast


@functools.cache
def _deferring(rotary: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``rotary``, which computes ``function``, or what leaves it to attention where that can do it."""

    def deferring(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any):
        plain = not args and not kwargs and type(q) is type(k) is torch.Tensor and not torch.is_grad_enabled()
        few = plain and q.dim() == 4 and cos.dim() == 3 and q.shape[2] == k.shape[2] <= MOST_ATTENDING
        same = len({x.dtype for x in (q, k, cos, sin)}) == 1 and cos.shape[-1] in (q.shape[-1], q.shape[-1] / 2)
        if not few or not same or not _rotates(function, by_halves=cos.shape[-1] < q.shape[-1]):
            return rotary(q, k, cos, sin, *args, **kwargs)
        return deferred_rotation(rotary, q, k, cos, sin)

    return deferring


@functools.cache
def _rotary(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what computes ``function`` by our operation where it can."""

    def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any):
        plain = not args and not kwargs and q.dim() == 4 and cos.dim() == 3
        same = len({x.dtype for x in (q, k, cos, sin)}) == 1 and cos.shape[-1] == q.shape[-1]
        if not plain or not same or not computes(q):
            return function(q, k, cos, sin, *args, **kwargs)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    return rotary


@functools.cache
def _rotates(function: Any, by_halves: bool = False) -> bool:
    """Whether a function turns q and k as :func:`specdec_layers.rotate` does, ``by_halves`` of cos and sin that are
    given once for both numbers of a pair."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 3, _SIZE, generator=generator) for heads in (4, 2))
    cos, sin = (torch.randn(2, 3, _SIZE, generator=generator) for _ in range(2))
    try:
        found = function(q, k, *(x[..., : _SIZE // 2] if by_halves else x for x in (cos, sin)))
    except Exception:  # others take other arguments
        return False
    if by_halves:
        cos, sin = (torch.cat([x[..., : _SIZE // 2]] * 2, -1) for x in (cos, sin))
    own = rotate(q, cos, sin), rotate(k, cos, sin)
    return len(found) == 2 and all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, own, strict=True))


class NativeAngles:
    """Of a module that computes the cos and sin of rotary embeddings."""

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None):
        kind = "" if layer_type is None else f"{layer_type}_"
        if not computes(x) or position_ids.dim() != 2:
            return super().forward(x, position_ids, *([] if layer_type is None else [layer_type]))  # type: ignore[misc]
        scale = getattr(self, f"{kind}attention_scaling")
        return rope_angles(position_ids, getattr(self, f"{kind}inv_freq"), scale=scale, dtype=x.dtype)


def _angles(module: nn.Module) -> nn.Module | None:
    buffers = {name: b for name, b in module._buffers.items() if b is not None and name.endswith("inv_freq")}
    if not buffers:
        return None
    parameters = [*inspect.signature(module.forward).parameters]
    if (
        parameters[:2] != ["x", "position_ids"]
        or parameters[2:] not in ([], ["layer_type"])
        or "forward" in vars(module)
    ):
        return None
    kinds = [name.removesuffix("inv_freq") for name in buffers if not name.endswith("original_inv_freq")]
    fast = copy.copy(module)
    reclass(fast, NativeAngles)
    if not kinds or not all(_computes_angles(module, fast, kind, parameters[2:]) for kind in kinds):
        return None
    return fast


def _computes_angles(module: nn.Module, fast: nn.Module, kind: str, more: Sequence[str]) -> bool:
    """Whether cos and sin depend on the tokens' own positions alone, as ours do. (Frequencies may depend on how long
    the text is.)"""
    of_kind = getattr(module, "rope_type", None)
    types = of_kind if isinstance(of_kind, dict) else {"": of_kind}
    if not {*types.values()}.isdisjoint(("dynamic", "longrope")) or getattr(module, f"{kind}inv_freq").dim() != 1:
        return False
    device = getattr(module, f"{kind}inv_freq").device
    x, positions = torch.zeros(1, 1, 1, device=device), torch.tensor([[0, 1, 7, 100, 2047]], device=device)
    given = [kind.removesuffix("_")] if more else []
    try:
        with torch.no_grad():
            found, own = (part.forward(x, positions, *given) for part in (module, fast))
    except Exception:  # others compute something else
        return False
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(found, own, strict=True)
    )


class NativeGated:
    """Of a module that computes ``down_proj(activation(gate_proj(x)) * up_proj(x))``."""

    activation: Literal["silu", "gelu_tanh"]

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not computes(x) or x.dim() != 3 or torch.is_autocast_enabled("cpu"):
            return super().forward(x)  # type: ignore[misc]
        y = gated_together(x, self.gate_proj, self.up_proj, self.activation)
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.activation) if y is None else y)


def _gated(module: nn.Module) -> nn.Module | None:
    if not {"gate_proj", "up_proj", "down_proj", "act_fn"} == {*module._modules} or "forward" in vars(module):
        return None
    activation = _activation_of(cast(Any, type(module)), cast(Any, type(module._modules["act_fn"])))
    if activation is None:
        return None
    fast = copy.copy(module)
    reclass(fast, NativeGated, activation=activation)
    return fast


@functools.cache
def _activation_of(kind: Any, act_fn: Any) -> str | None:
    """Returns the activation of a class of gated layers; None: it computes something else."""
    if [*inspect.signature(kind.forward).parameters][2:]:
        return None
    tried = kind.__new__(kind)
    nn.Module.__init__(tried)
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        gate, up, down = nn.Linear(_SIZE, 32), nn.Linear(_SIZE, 32), nn.Linear(32, _SIZE)
        x = 3 * torch.randn(1, 8, _SIZE)
        try:
            tried.gate_proj, tried.up_proj, tried.down_proj, tried.act_fn = gate, up, down, act_fn()
            found = tried(x)
        except Exception:  # other classes need what this one was not given
            return None
        for activation in ("silu", "gelu_tanh"):
            own = down(gated(gate(x), up(x), activation))
            if found.shape == own.shape and torch.allclose(found, own, rtol=1e-5, atol=1e-5):
                return activation
    return None
