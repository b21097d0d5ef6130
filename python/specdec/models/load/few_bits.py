"""Weights that are rounded to fewer bits while a model is loaded: by what, and what cannot be."""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import Literal

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from specdec_kernels import Packing

from ...checks import refuse
from ..exchanged.copied_modules import reclass
from ..exchanged.int8_linear import can_be_int8, to_int8
from ..exchanged.linear import has_native
from ..exchanged.packed_weights import num_parameters
from ..exchanged.product import DTYPES, has_kernel
from ..exchanged.stored_weights import Packed, kept, pack_weights
from .pretrained import quantisation

Bits = Literal[4, 8]
PACKINGS = {8: Packing.Q8_0}  # by bits, on a CPU
MOST = 0.9  # of a model's parameters; where fewer are packed, a warning says so


def rounds(device: torch.device | str, bits: Bits | None) -> bool:
    """Whether it is ours that rounds to so many bits on such a device; else it is bitsandbytes, or nobody."""
    return bits is not None and (_is_cpu(device) or (bits == 8 and has_kernel()))


def dtype_to_round(dtype: torch.dtype | str, device: torch.device | str) -> torch.dtype | str:
    """Returns the dtype in which weights are loaded first. On a CPU those that are not rounded stay stored as they were
    saved, and compute in float32."""
    return "auto" if _is_cpu(device) else dtype


def check_bits(path: str | os.PathLike, dtype: torch.dtype | None, device: torch.device | str, bits: Bits) -> None:
    """Refuses what cannot be rounded, before it is loaded.

    Args:
        path: a folder or hub name.
        dtype: that was asked for; None: the one in which the weights were saved.

    Raises:
        ValueError: names ``bits`` or ``dtype``.
    """
    if _is_cpu(device) and bits not in PACKINGS:
        refuse("bits", f"{bits!r} on a CPU", "8 or None")
    if bits not in (4, 8):
        refuse("bits", bits, "4, 8 or None")
    if rounds(device, bits) and dtype is not None:
        _check_dtype(dtype, device)
    if quantisation(path) is not None:
        refuse("bits", f"{bits} for weights that are quantised already", "None for them")
    if _is_cpu(device) and not has_native():
        refuse("bits", f"{bits} on a CPU without native code", "None")
    if not rounds(device, bits) and importlib.util.find_spec("bitsandbytes") is None:
        refuse("bits", f"{bits} without bitsandbytes", "None, or: pip install bitsandbytes")


def _is_cpu(device: torch.device | str) -> bool:
    return torch.device(device).type == "cpu"


def _check_dtype(dtype: torch.dtype, device: torch.device | str) -> None:
    given = str(dtype).removeprefix("torch.")
    if _is_cpu(device) and dtype != torch.float32:
        refuse("dtype", f"{given} with bits on a CPU", "auto or float32, in which packed weights are computed")
    if not _is_cpu(device) and dtype not in DTYPES:
        refuse("dtype", f"{given} with bits=8 on a GPU", "bfloat16 or float16, in which x and results are")


def round_weights(model: PreTrainedModel, bits: Bits, device: torch.device | str) -> PreTrainedModel:
    """Rounds the weights of a model on a CPU, in place, and returns it on ``device``. On a GPU these are the weights of
    linear layers, one after the other, so that not all of them have to fit there as they were; an embedding stays, and
    a head that is tied to it has weights of its own.

    Raises:
        ValueError: names ``bits`` or ``dtype``: there are no weights that can be rounded.
    """
    if _is_cpu(device):
        packed = pack_weights(model, PACKINGS[bits])
        every = num_parameters(model)
    else:
        _check_dtype(model.dtype, device)
        embeddings = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
        packed = to_int8([layer for layer in kept(model, *DTYPES)[0] if can_be_int8(layer)], device)
        every = num_parameters(model) - sum(embeddings.values())
        reclass(model, Packed)
    if not packed:
        refuse("bits", f"{bits} for weights that are in no rows of whole blocks", "None for them")
    if (share := packed / every) < MOST:
        told = f"bits: {share:.0%} of the model's parameters are packed; the layers of the others cannot be"
        warnings.warn(told, RuntimeWarning, stacklevel=3)
    return model.to(device)  # type: ignore[arg-type]


def by_bitsandbytes(bits: Bits) -> BitsAndBytesConfig:
    """How transformers rounds weights while it loads them on a GPU."""
    return BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4)
