"""transformers' own loading, with errors that name the argument instead of half-loaded weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ...checks import one_line
from ...fields import HEADS, SIZE, TOKENS, Field, Number, wrong

# Of numbers in a config.json that decide how much is built before the weights are looked at.
_LAYERS = Number(0, 2**12)
_SIZES: dict[str, Field] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _LAYERS),
    **dict.fromkeys(("hidden_size", "intermediate_size", "n_embd", "n_inner", "d_model", "ffn_dim"), SIZE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "head_dim"), HEADS),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), TOKENS),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "num_labels"), Number(0, 2**16)),
}


def from_pretrained(path: str | os.PathLike, dtype: torch.dtype | str, name: str, **placed: Any) -> PreTrainedModel:
    """Returns the model in a folder, or of a hub name: safetensors only, no remote code.

    Args:
        name: the caller's name for ``path``, for errors.
        placed: where its weights go, and how they are quantised, as transformers takes it.

    Raises:
        OSError: a file is corrupt, weights are missing in it, or a library is.
        ValueError: it holds no causal language model.
    """
    with loading(name, path):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **placed
        )
        model, report = loaded
        if getattr(model.config, "quantization_config", None) is not None and not hasattr(model, "hf_quantizer"):
            raise ValueError(f"its quantisation {quantisation(path)} is none that transformers knows")
    # transformers fills absent weights with random numbers and only warns; the text would be nonsense.
    absent = sorted(report["missing_keys"])
    if absent:
        raise OSError(f"{name}: the weights in {str(path)!r} lack {len(absent)} tensors, the first is {absent[0]!r}")
    return model


@contextmanager
def loading(name: str, path: str | os.PathLike) -> Iterator[None]:
    """Errors of what is loaded inside name the argument and the path."""
    try:
        yield
    except (OSError, SafetensorError, ImportError) as error:
        raise OSError(f"{name}: cannot load a model from {str(path)!r}: {error}") from error
    except Exception as error:  # transformers raises whatever a broken entry of a file leads to
        told = one_line(error, 600) or type(error).__name__
        raise ValueError(f"{name}: {str(path)!r} does not hold a causal language model: {told}") from error


def check_entries(name: str, path: str | os.PathLike) -> None:
    """Refuses a folder or hub name whose config.json has a size that nothing is built of, before transformers tries.

    Raises:
        OSError: names ``name``: config.json is missing or cannot be read.
        ValueError: names ``name``, the entry and its range.
    """
    try:
        entries, _ = PreTrainedConfig.get_config_dict(path)
        parts = [entries, *(part for part in entries.values() if isinstance(part, dict))]
    except Exception as error:
        raise OSError(f"{name}: cannot load {str(path)!r}: {one_line(error, 600)}") from error
    for part in parts:
        # What is no number has other meanings in some models, and is left to them.
        numbers = {entry: value for entry, value in part.items() if isinstance(value, int | float)}
        for entry, value, allowed in wrong(numbers, _SIZES):
            raise ValueError(f"{name}: config.json of {str(path)!r} has {entry} {value}, allowed: {allowed}")


def quantisation(path: str | os.PathLike) -> object:
    """What the configuration says of it; None: nothing."""
    return getattr(AutoConfig.from_pretrained(path, trust_remote_code=False), "quantization_config", None)
