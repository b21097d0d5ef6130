"""In which dtype a model computes if nobody chose one."""

from __future__ import annotations

import os

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from .cpu_units import OF_BFLOAT16, cpu_units
from .free_memory import free_memory, size_text

ROOM = 1.25  # times the weights: what is free has to hold the caches, too


def float32_instead(path: str | os.PathLike, device: torch.device | str) -> str | None:
    """Why a model that was saved in bfloat16 is to compute in float32 here; None: the dtype in which it was saved is
    the default.

    A CPU that has no units for bfloat16 converts every weight each time that it reads it, and is slower with half of
    the bytes. That is so of a CPU whose units are unknown, too. A model whose weights would not fit in float32 stays
    as it is, as do quantised ones.

    Args:
        path: a folder, or a name on the Hugging Face hub, whose configuration alone is read.

    Raises:
        OSError, ValueError: the configuration cannot be read.
    """
    if torch.device(device).type != "cpu" or not OF_BFLOAT16.isdisjoint(cpu_units()):
        return None
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if config.dtype != torch.bfloat16 or getattr(config, "quantization_config", None) is not None:
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    size, free = 4 * model.num_parameters(), free_memory(torch.device("cpu"))
    if free is not None and ROOM * size > free:
        return None
    return f"this CPU has no units for bfloat16, and the weights fit in float32 ({size_text(size)})"
