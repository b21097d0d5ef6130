"""Weights that are rounded to fewer bits while a model is loaded: by what, and what cannot be."""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import Literal

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from specdec_kernels import Packing

from ..checks import refuse
from .linear import has_native
from .packed_weights import num_parameters
from .pretrained import quantisation
from .stored_weights import pack_weights

Bits = Literal[4, 8]
PACKINGS = {8: Packing.Q8_0}  # by bits, on a CPU
MOST = 0.9  # of a model's parameters; where fewer are packed, a warning says so


def check_bits(path: str | os.PathLike, dtype: torch.dtype | None, device: torch.device | str, bits: Bits) -> None:
    """Refuses what cannot be rounded, before it is loaded.

    Args:
        path: a folder or hub name.
        dtype: that was asked for; None: the one in which the weights were saved.

    Raises:
        ValueError: names ``bits`` or ``dtype``.
    """
    on_cpu = torch.device(device).type == "cpu"
    if on_cpu and bits not in PACKINGS:
        refuse("bits", f"{bits!r} on a CPU", "8 or None")
    if bits not in (4, 8):
        refuse("bits", bits, "4, 8 or None")
    if on_cpu and dtype not in (None, torch.float32):
        refuse(
            "dtype",
            f"{str(dtype).removeprefix('torch.')} with bits on a CPU",
            "auto or float32, in which packed weights are computed",
        )
    if quantisation(path) is not None:
        refuse("bits", f"{bits} for weights that are quantised already", "None for them")
    if on_cpu and not has_native():
        refuse("bits", f"{bits} on a CPU without native code", "None")
    if not on_cpu and importlib.util.find_spec("bitsandbytes") is None:
        refuse("bits", f"{bits} without bitsandbytes", "None, or: pip install bitsandbytes")


def round_weights(model: PreTrainedModel, bits: Bits) -> PreTrainedModel:
    """Rounds the weights of a model on a CPU, in place, and returns it.

    Raises:
        ValueError: names ``bits``: there are no weights that can be rounded.
    """
    packed = pack_weights(model, PACKINGS[bits])
    if not packed:
        refuse("bits", f"{bits} for weights that are in no rows of whole blocks", "None for them")
    if (share := packed / num_parameters(model)) < MOST:
        told = f"bits: {share:.0%} of the model's parameters are packed; the layers of the others cannot be"
        warnings.warn(told, RuntimeWarning, stacklevel=3)
    return model


def by_bitsandbytes(bits: Bits) -> BitsAndBytesConfig:
    """How transformers rounds weights while it loads them on a GPU."""
    return BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4)
