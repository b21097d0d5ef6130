"""transformers' own loading, with errors that name the argument instead of half-loaded weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


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
    except (ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"{name}: {str(path)!r} does not hold a causal language model: {error}") from error


def quantisation(path: str | os.PathLike) -> object:
    """What the configuration says of it; None: nothing."""
    return getattr(AutoConfig.from_pretrained(path, trust_remote_code=False), "quantization_config", None)
