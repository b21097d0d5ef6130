"""Weights that are rounded to fewer bits while a model is loaded: by ours, or by bitsandbytes."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from specdec_layers import Packing
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from ...checks import refuse
from ..exchanged.copied_modules import reclass
from ..exchanged.int8_linear import can_be_int8, to_int8
from ..exchanged.packed_weights import num_parameters
from ..exchanged.product import DTYPES
from ..exchanged.stored_weights import Packed, kept, pack_weights

Bits = Literal[4, 8]
PACKINGS = {8: Packing.Q8_0}  # by bits, on a CPU
MOST = 0.9  # of a model's parameters; where fewer are packed, a warning says so


def is_cpu(device: torch.device | str) -> bool:
    return torch.device(device).type == "cpu"


def round_weights(model: PreTrainedModel, bits: Bits, device: torch.device | str) -> PreTrainedModel:
    """Rounds the weights of a model on a CPU, in place, and returns it on ``device``. On a GPU these are the weights of
    linear layers, one after the other, so that not all of them have to fit there as they were; an embedding stays, and
    a head that is tied to it has weights of its own.

    Raises:
        ValueError: names ``bits``: there are no weights that can be rounded.
    """
    if is_cpu(device):
        packed = pack_weights(model, PACKINGS[bits])
        every = num_parameters(model)
    else:
        embeddings = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
        packed = to_int8([layer for layer in kept(model, *DTYPES)[0] if can_be_int8(layer)], device)
        every = num_parameters(model) - sum(embeddings.values())
        reclass(model, Packed)
    if not packed:
        refuse("bits", f"{bits} for weights that are in no rows of whole blocks", "None for them")
    if (share := packed / every) < MOST:
        told = f"bits: {share:.0%} of the model's parameters are packed; the layers of the others cannot be"
        warnings.warn(told, RuntimeWarning, stacklevel=4)
    return model.to(device)  # type: ignore[arg-type]


def by_bitsandbytes(bits: Bits) -> BitsAndBytesConfig:
    """How transformers rounds weights while it loads them on a GPU."""
    return BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4)
