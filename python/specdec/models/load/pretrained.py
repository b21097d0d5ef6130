"""transformers' own loading: safetensors only, no remote code, and an error instead of half-loaded weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from .saved_model import SavedModel


def from_pretrained(saved: SavedModel, dtype: torch.dtype | None, **placed: Any) -> PreTrainedModel:
    """
    Args:
        dtype: of the weights, or of the computation if they are quantised; None: the one in which they were saved.
        placed: where its weights go, and how they are quantised, as transformers takes it.

    Raises:
        OSError: a file is corrupt, weights are missing in it, or a library is.
        ValueError: it holds no causal language model.
    """
    with saved.at.loading():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            saved.at.path,
            config=saved.config,
            dtype="auto" if dtype is None else dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **placed,
        )
        model, report = loaded
        if getattr(model.config, "quantization_config", None) is not None and not hasattr(model, "hf_quantizer"):
            raise ValueError(f"its quantisation {saved.quantisation} is none that transformers knows")
    # transformers fills absent weights with random numbers and only warns; the text would be nonsense.
    if absent := sorted(report["missing_keys"]):
        told = f"the weights in {saved.at} lack {len(absent)} tensors, the first is {absent[0]!r}"
        raise OSError(f"{saved.at.name}: {told}")
    return model
