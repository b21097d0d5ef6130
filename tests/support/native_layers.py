"""Modules that are exchanged on a GPU, on a CPU."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any, TypeVar

import pytest
import torch
from specdec.models.exchanged import elementwise, linear, norms, product
from specdec.models.exchanged.decoder_layers import NativeLayer, with_native_layers
from specdec.models.exchanged.elementwise import with_elementwise
from specdec.models.exchanged.merged import with_merged
from specdec_layers import (
    Packing,
    add_linear,
    add_rms_norm,
    gated,
    norm_linear,
    rms_norm,
    rope_angles,
    rotate,
    unpack_int8,
)
from specdec_layers.backends import operation
from torch import nn
from torch.nn import functional as F

M = TypeVar("M", bound=nn.Module)


def on_a_cpu(model: M) -> M:
    return with_native_layers(with_elementwise(model), "cpu")


def layers_of(model: nn.Module) -> list[NativeLayer]:
    return [module for module in model.modules() if isinstance(module, NativeLayer)]


def unhooked(model: M) -> M:
    """A copy without the hooks that transformers leaves in a model that was once asked for hidden states."""
    model = copy.deepcopy(model)
    for module in model.modules():
        module._forward_hooks.clear()
    return model


def noted_sums(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The sums and norms that are computed at once from now on."""
    made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def noted(*args, **kwargs):
        made.append(own(*args, **kwargs))
        return made[-1]

    own = norms.add_rms_norm
    monkeypatch.setattr(norms, "add_rms_norm", noted)
    return made


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Models on a CPU get what those on a GPU get: the kernel of products by its definition, and those of 16 bits
    that are Triton's in its interpreter. Returns how often each operation is called from now on."""
    calls = Counter[str]()

    def counted(name: str, operation: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return operation(*args, **kwargs)

        return call

    def by_triton(own: Any, *options: str) -> Any:
        """``own``, which computes in float32 on a CPU, of 16 bits in the interpreter."""
        defaults = {"offset": 0.0, "round_first": False, "delta_weight": None, "delta_epsilon": 0.0}

        def call(*args: Any, **kwargs: Any) -> Any:
            if args[0].dtype == torch.float32:
                return own(*args, **kwargs)
            given = [{**defaults, **kwargs}[option] for option in options]
            return operation(own.__name__, "triton", "cpu")(*args, *given)

        return call

    def by_name(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        if gate.dtype == torch.float32:
            return gated(gate, up, activation)
        return operation("gated", "triton", "cpu")(gate, up, activation == "gelu_tanh")

    def by_definition(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, packing: Packing):
        return F.linear(x, weight if packing == Packing.NONE else unpack_int8(weight, x.dtype), bias)

    def angles(positions: torch.Tensor, frequencies: torch.Tensor, *, scale: float, dtype: torch.dtype) -> Any:
        return tuple(x.to(dtype) for x in rope_angles(positions, frequencies, scale=scale))

    sums = ("offset", "round_first", "delta_weight", "delta_epsilon")
    for module, name, own in (
        (product, "linear", by_definition), (product, "norm_linear", norm_linear), (product, "add_linear", add_linear),
        (norms, "rms_norm", by_triton(rms_norm, "offset", "round_first")),
        (norms, "add_rms_norm", by_triton(add_rms_norm, *sums)),
        (elementwise, "rotate", by_triton(rotate)), (elementwise, "gated", by_name),
        (elementwise, "rope_angles", angles),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, counted(name, own))
    for module in (product, linear, norms):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    for module in (product, linear):
        monkeypatch.setattr(module, "DTYPES", (torch.float32, torch.bfloat16, torch.float16))
    monkeypatch.setattr(product, "UNIT", 1)
    monkeypatch.setattr(product, "has_kernel", lambda: True)
    monkeypatch.setattr(linear, "is_ours", lambda x: False)
    for own in (with_merged, with_native_layers):
        replaced = functools.partial(own, device="cpu")
        monkeypatch.setattr(f"specdec.models.forward.forwards.{own.__name__}", replaced)
    return calls
