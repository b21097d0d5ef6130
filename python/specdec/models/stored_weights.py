"""Models on a CPU whose weights stay stored as bfloat16, while they compute in float32.

Every number of bfloat16 is one of float32, so all results are those of the model loaded in float32, to the last bit,
with half of the bytes that a step reads. Hidden states are not rounded, as they are in a model that computes in
bfloat16.
"""

from __future__ import annotations

import copy
import dis
import inspect
import warnings
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from .copied_modules import reclass
from .free_memory import free_memory, size_text
from .linear import NativeLinear, has_native, is_plain


class _ComputesInFloat32:
    """Of a ``PreTrainedModel``."""

    @property
    def dtype(self: Any) -> torch.dtype:
        """The dtype in which it computes."""
        return torch.promote_types(torch.float32, next(p.dtype for p in self.parameters() if p.is_floating_point()))


class _StoredEmbedding:
    """Of an ``nn.Embedding``, or a class that does more with the rows of its table."""

    def forward(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        if self.weight.dtype != torch.bfloat16:
            return super().forward(tokens)  # type: ignore[misc]
        # Its own forward, over a table of the rows that are asked for.
        few = copy.copy(self)
        rows = F.embedding(tokens, self.weight).float().view(-1, self.embedding_dim)
        few._parameters = {**self._parameters, "weight": rows}
        few.padding_idx = None
        return few.forward(torch.arange(tokens.numel()).view(tokens.shape))


def stores_bfloat16(model: nn.Module) -> bool:
    """Whether ``model`` was changed by :func:`compute_in_float32`."""
    return isinstance(model, _ComputesInFloat32)


def compute_in_float32(model: PreTrainedModel) -> PreTrainedModel:
    """Makes a model of bfloat16 on a CPU compute in float32, in place, and returns it. The weights of its linear layers
    and embeddings stay as they are; all others become float32, experts among them; without native code all do. If they
    do not fit the memory, it stays as it was, with a warning."""
    linear, embeddings = _kept(model) if has_native() else ([], [])
    kept = {id(module.weight) for module in (*linear, *embeddings)}
    rest = [
        tensor
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and tensor.is_floating_point() and id(tensor) not in kept
    ]
    size, free = 4 * sum({id(tensor): tensor.numel() for tensor in rest}.values()), free_memory(model.device)
    if free is not None and size > free:
        taken = f"{size_text(size)} for weights that are not those of linear layers, where {size_text(free)} are free"
        told = f"dtype: float32 would take {taken}; the model computes in bfloat16"
        warnings.warn(told, RuntimeWarning, stacklevel=5)
        return model
    for tensor in rest:
        tensor.data = tensor.data.float()
    for module in list(model.modules()):
        if isinstance(module, PreTrainedModel):
            reclass(module, _ComputesInFloat32)
    for module in linear:
        module.__class__ = NativeLinear
    for module in embeddings:
        reclass(module, _StoredEmbedding)
    return model


def _kept(model: PreTrainedModel) -> tuple[list[nn.Linear], list[nn.Embedding]]:
    """Returns the modules whose weights no other code reads, so they may stay as they are."""
    modules = list(model.modules())
    names = {kind: _read_by(kind) for kind in {type(module) for module in modules}}
    read = {id(getattr(m._modules.get(name), "weight", None)) for m in modules for name in names[type(m)]}
    linear, embeddings = list[nn.Linear](), list[nn.Embedding]()
    for module in modules:
        if is_plain(module, torch.bfloat16) and id(module.weight) not in read:
            linear.append(cast(nn.Linear, module))
        elif isinstance(module, nn.Embedding) and id(module.weight) not in read:
            if len(inspect.signature(module.forward).parameters) == 1:
                embeddings.append(module)
    return linear, embeddings


def _read_by(kind: type[nn.Module]) -> frozenset[str]:
    """Returns the names of the modules whose ``weight`` a module of this class reads itself, other than to initialise
    it: multiplies by it, or rounds inputs to its dtype."""
    found = set[str]()
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_") or name in vars(PreTrainedModel) or name in vars(nn.Module):
            if name != "forward":
                continue
        steps = [step.argval for step in dis.get_instructions(inspect.unwrap(function))]
        found.update(owner for owner, part in zip(steps, steps[1:], strict=False) if part == "weight")
    return frozenset(name for name in found if isinstance(name, str))
