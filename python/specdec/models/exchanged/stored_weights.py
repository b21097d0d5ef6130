"""Models on a CPU whose weights stay stored as bfloat16, or are rounded to fewer bits, while they compute in float32.

Every number of bfloat16 is one of float32, so all results are those of the model loaded in float32, to the last bit,
with half of the bytes that a step reads. Hidden states are not rounded, as they are in a model that computes in
bfloat16. Packed weights (``packed_weights``) are others than those of the file, and with them the model is another one.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
import warnings
from typing import Any, cast

import torch
from specdec_layers import Packing, interleave, quantise
from torch import nn
from transformers import PreTrainedModel

from ..machine.free_memory import free_memory, size_text
from .copied_modules import reclass
from .linear import NativeLinear, has_native, is_plain
from .packed_weights import ROWS_AT_ONCE, StoredEmbedding, pack

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALVES)


class _ComputesInFloat32:
    """Of a ``PreTrainedModel``."""

    @property
    def dtype(self: Any) -> torch.dtype:
        """The dtype in which it computes."""
        return torch.promote_types(torch.float32, next(p.dtype for p in self.parameters() if p.is_floating_point()))


class Packed:
    """Of a ``PreTrainedModel``."""

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "model: its weights are packed, and files of transformers have none; to save it, load it without bits, or "
            "the folder that specdec convert writes of its GGUF file"
        )


def stores_bfloat16(model: nn.Module) -> bool:
    """Whether ``model`` was changed by :func:`compute_in_float32`."""
    return isinstance(model, _ComputesInFloat32)


def computing_dtype(model: PreTrainedModel) -> torch.dtype:
    """Returns the dtype of the hidden states: that of the first parameter that is not quantised (not an integer or an
    8-bit float), unless it is only stored in that."""
    if stores_bfloat16(model):
        return model.dtype
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point() and p.itemsize > 1)
    configured = model.config.dtype
    default = configured if isinstance(configured, torch.dtype) else torch.get_default_dtype()
    return next(dtypes, default)


def compute_in_float32(model: PreTrainedModel) -> PreTrainedModel:
    """Makes a model on a CPU compute in float32, in place, and returns it. Weights of 16 bits of its linear layers and
    embeddings stay as they are; all others become float32, experts among them; without native code all do. If they do
    not fit the memory, it stays as it was, with a warning."""
    linear, embeddings = kept(model, *HALVES) if has_native() else ([], [])
    stay = {id(module.weight) for module in (*linear, *embeddings)}
    rest = [
        tensor
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
        and tensor.is_floating_point()
        and tensor.dtype != torch.float32
        and id(tensor) not in stay
    ]
    size, free = 4 * sum({id(tensor): tensor.numel() for tensor in rest}.values()), free_memory(model.device)
    if free is not None and size > free:
        taken = f"{size_text(size)} for weights that are not those of linear layers, where {size_text(free)} are free"
        told = f"dtype: float32 would take {taken}; the model computes in bfloat16"
        warnings.warn(told, RuntimeWarning, stacklevel=4)
        return model
    for tensor in rest:
        tensor.data = tensor.data.float()
    for module in list(model.modules()):
        if isinstance(module, PreTrainedModel):
            reclass(module, _ComputesInFloat32)
    for module in linear:
        module.__class__ = NativeLinear
    for module in embeddings:
        reclass(module, StoredEmbedding)
    return model


def pack_weights(model: PreTrainedModel, packing: Packing) -> int:
    """Rounds the weights of a model's linear layers and embeddings on a CPU to blocks, in place, and makes the model
    compute in float32. Weights that other code reads, or whose rows are no whole blocks, are stored as
    :func:`compute_in_float32` leaves them. Returns how many parameters were packed.

    Raises:
        RuntimeError: there is no native code.
    """
    if not has_native():
        raise RuntimeError("packed weights on a CPU take native code, which is missing")
    found = [m for kind in kept(model, *FLOATS) for m in kind if m.weight.shape[1] % packing.block[0] == 0]
    sharing: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            sharing.setdefault(id(parameter), []).append(module)
    packed = 0
    for modules in [sharing[key] for key in {id(module.weight): None for module in found}]:
        if any(module not in found for module in modules):
            continue
        weight = cast(torch.Tensor, modules[0].weight)
        packed += weight.numel()
        blocks = torch.cat([quantise(rows, packing) for rows in weight.split(ROWS_AT_ONCE)])
        shared = nn.Parameter(interleave(blocks), requires_grad=False)
        for module in modules:
            pack(cast(nn.Linear, module), shared, packing)
        del weight
    compute_in_float32(model)
    reclass(model, Packed)
    return packed


def kept(model: PreTrainedModel, *dtypes: torch.dtype) -> tuple[list[nn.Linear], list[nn.Embedding]]:
    """Returns the modules on a CPU of these dtypes whose weights no other code reads, so they may be stored anyhow."""
    modules = list(model.modules())
    names = {kind: _read_by(kind) for kind in {type(module) for module in modules}}
    read = {id(getattr(m._modules.get(name), "weight", None)) for m in modules for name in names[type(m)]}
    linear, embeddings = list[nn.Linear](), list[nn.Embedding]()
    for module in modules:
        if is_plain(module, *dtypes) and id(module.weight) not in read:
            linear.append(cast(nn.Linear, module))
        elif isinstance(module, nn.Embedding) and module.weight.dtype in dtypes and id(module.weight) not in read:
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
        found |= _weights_in(inspect.unwrap(function).__code__)
    return frozenset(found)


@functools.lru_cache(1024)  # models share most of their classes
def _weights_in(code: types.CodeType) -> frozenset[str]:
    """Returns the names before ``.weight``."""
    steps = [step.argval for step in dis.get_instructions(code)]
    owners = (owner for owner, part in zip(steps, steps[1:], strict=False) if part == "weight")
    return frozenset(name for name in owners if isinstance(name, str))
