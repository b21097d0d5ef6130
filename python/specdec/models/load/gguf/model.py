"""The model of a GGUF file: transformers' own, with the file's tensors mapped in place of its parameters."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from specdec_layers import Packing, interleave
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ....checks import one_line
from ...exchanged.copied_modules import reclass
from ...exchanged.linear import has_native
from ...exchanged.packed_weights import is_packed, pack
from ...exchanged.stored_weights import Packed, compute_in_float32
from ...machine.free_memory import size_text
from .file import GgufFile
from .rope import FACTORS

F32, FLOATS = 0, {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
PACKINGS = {int(packing): packing for packing in Packing if packing.is_of_blocks}


def gguf_model(file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Returns the model on the CPU, in evaluation mode.

    Args:
        dtype: to which all weights are expanded; None: those of linear layers and embeddings stay as the file stores
            them, and the model computes in float32.

    Raises:
        ValueError: names the file: it lacks a tensor of the model, has one of another, or one of a type that cannot be
            read.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32)
        _make_buffers(model)
    except Exception as error:  # whatever the classes of transformers raise for sizes that do not fit each other
        file.refuse(f"transformers cannot make a model of its sizes: {one_line(error)}")
    stored = dtype is None and has_native()
    if dtype is None:
        _tell_of_expanded(file, stored)
    placed: dict[str, nn.Parameter] = {}
    for name, of_file in _places(model, file).items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        if of_file not in placed:  # else it is tied to another one
            weight = _weight(file, of_file, config, stored and isinstance(module, nn.Linear | nn.Embedding))
            placed[of_file] = nn.Parameter(weight if dtype is None else weight.to(dtype, copy=True), dtype is not None)
        if placed[of_file].dtype == torch.uint8:
            pack(module, placed[of_file], PACKINGS[file.tensors[of_file].type])
        else:
            module._parameters[own] = placed[of_file]
    if dtype is None:
        compute_in_float32(model)
        if any(is_packed(module) for module in model.modules()):
            reclass(model, Packed)
    return model.eval()


def _tell_of_expanded(file: GgufFile, stored: bool) -> None:
    """Warns of the memory that weights take which do not stay as they are."""
    stay = {*FLOATS, *PACKINGS} if stored else {F32}
    grown = [tensor for tensor in file.tensors.values() if tensor.type not in stay]
    if grown:
        types = ", ".join(sorted({tensor.type_name for tensor in grown}))
        size = size_text(sum(4 * math.prod(tensor.shape) for tensor in grown))
        told = f"{file.name}: weights of {types} in {str(file.path)!r} are expanded to float32, which takes {size}"
        warnings.warn(told if stored else f"{told}, without native code", RuntimeWarning, stacklevel=5)


def _make_buffers(model: PreTrainedModel) -> None:
    """Those that are computed, such as frequencies, by what initialises them. Weights have no storage yet."""
    for module in model.modules():
        computed = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        if computed:
            of_cpu = {name: torch.full_like(buffer, torch.nan, device="cpu") for name, buffer in computed.items()}
            module._buffers.update(of_cpu)
            model._init_weights(module)


def _places(model: PreTrainedModel, file: GgufFile) -> dict[str, str]:
    """The file's tensor of each parameter."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    names = get_tensor_name_map(kind, model.config.num_hidden_layers)
    found = {}
    for name in model.state_dict():
        stem, _, suffix = name.rpartition(".")
        found[name] = f"{names.get_name(stem)}.{suffix}"
    if model.config.tie_word_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    if absent := sorted(name for name, of_file in found.items() if of_file not in file.tensors):
        file.refuse(f"it lacks {len(absent)} tensors, the first is that of {absent[0]!r}")
    if left := sorted(file.tensors.keys() - found.values() - FACTORS):
        file.refuse(f"it has {len(left)} tensors that its model has not, the first is {left[0]!r}")
    for name, weight in model.state_dict().items():
        if (shape := file.tensors[found[name]].shape) != weight.shape:
            file.refuse(f"tensor {found[name]!r} is {list(shape)}, the model's {list(weight.shape)}")
    return found


def _weight(file: GgufFile, name: str, config: Any, stored: bool) -> torch.Tensor:
    """A tensor of the file in transformers' order: as it is stored, if the kernels read that, and interleaved if it is
    packed, or float32."""
    tensor, architecture = file.tensors[name], file.architecture
    if tensor.type in FLOATS:
        rows = tensor.data.view(FLOATS[tensor.type])
        rows = rows if stored else rows.float()
    else:
        rows = tensor.data if stored and tensor.type in PACKINGS else _expanded(file, name)
    if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        # The file has the rows of a head such that neighbours are rotated together, and not its halves.
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        rows = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        rows = rows - 1  # it has what is multiplied by, transformers what is added to 1
    return interleave(rows) if rows.dtype == torch.uint8 else rows


def _expanded(file: GgufFile, name: str) -> torch.Tensor:
    from gguf import GGMLQuantizationType, dequantize

    tensor = file.tensors[name]
    try:
        return torch.from_numpy(dequantize(tensor.data.numpy(), GGMLQuantizationType(tensor.type)))
    except NotImplementedError:
        file.refuse(f"tensor {name!r} is of type {tensor.type_name}, which gguf cannot expand")
