"""Scaled positions of a GGUF file, as transformers names them: the model computes what llama.cpp does."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .file import GgufFile

_KEYS = ("type", "factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow", "finetuned")
KEYS = frozenset(f"rope.scaling.{key}" for key in _KEYS)  # the last says nothing of what is computed
LLAMA3, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = frozenset((LLAMA3, SHORT, LONG))
# Of Llama 3.1 and all that came after it. Files have what these make of the frequencies, but for the factor.
_OF_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def scale_positions(config: Any, file: GgufFile) -> None:
    """Sets how ``config`` scales positions. Raises ValueError naming the file if transformers has no such scaling."""
    said = {key.removeprefix("rope.scaling."): v for key, v in file.of_model().items() if key in KEYS and v}
    tensors = sorted(FACTORS & file.tensors.keys())
    # Layers with a window have positions of their own, which are not scaled.
    parameters = config.rope_parameters.get("full_attention", config.rope_parameters)
    if file.architecture == "phi3" and (rotated := file.of_model().get("rope.dimension_count")) is not None:
        parameters["partial_rotary_factor"] = rotated / (config.hidden_size // config.num_attention_heads)
    more = _of_phi3(said, tensors, file, config) if file.architecture == "phi3" else _usual(said, tensors, file, config)
    if more is None:
        shown = ", ".join((*(f"rope.scaling.{key} {value}" for key, value in said.items()), *tensors))
        file.refuse(f"its positions are scaled ({shown}) in a way that transformers has not for {file.architecture}")
    parameters.update(more)


def _usual(said: dict[str, Any], tensors: list[str], file: GgufFile, config: Any) -> dict[str, Any] | None:
    """None: transformers has no such scaling."""
    kind, factor = said.get("type", "linear"), said.get("factor", 1.0)  # as llama.cpp reads a file without them
    factor, attention = 1.0 if kind == "none" else factor, said.get("attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn") or factor < 1.0 or (attention != 1.0 and kind != "yarn"):
        return None
    if tensors:
        fits = tensors == [LLAMA3] and factor == attention == 1.0 and "rope_theta" in config.rope_parameters
        return _of_llama3(config, file) if fits else None
    if factor == attention == 1.0:
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    attention *= 1 + 0.1 * math.log(factor)
    given = {key: said[f"yarn_{key}"] for key in ("beta_fast", "beta_slow") if f"yarn_{key}" in said}
    original = _original(said, config)
    return {"rope_type": "yarn", "factor": factor, "attention_factor": attention, **original, **given}


def _of_phi3(said: dict[str, Any], tensors: list[str], file: GgufFile, config: Any) -> dict[str, Any] | None:
    attention = said.get("attn_factor", 1.0)
    if tensors == [LONG, SHORT]:
        factors = {"short_factor": _factors(file, SHORT), "long_factor": _factors(file, LONG)}
        return {"rope_type": "longrope", "attention_factor": attention, **_original(said, config), **factors}
    return None if tensors or attention != 1.0 or said.get("factor", 1.0) != 1.0 else {}


def _original(said: dict[str, Any], config: Any) -> dict[str, int]:
    return {"original_max_position_embeddings": said.get("original_context_length", config.max_position_embeddings)}


def _factors(file: GgufFile, name: str) -> list[float]:
    if (tensor := file.tensors[name]).type_name != "F32":
        file.refuse(f"tensor {name!r} is of type {tensor.type_name}, and has to be F32")
    return tensor.data.view(torch.float32).tolist()


def _of_llama3(config: Any, file: GgufFile) -> dict[str, Any]:
    """A file has the divisors of the frequencies; the configuration what they were computed from."""
    divisors = torch.tensor(_factors(file, LLAMA3))
    if bool((divisors == 1).all()):
        return {}
    more = {"rope_type": "llama3", "factor": float(divisors.max()), **_OF_LLAMA3}
    trial = copy.deepcopy(config)
    trial.rope_parameters = {**config.rope_parameters, **more}
    meant, _ = ROPE_INIT_FUNCTIONS["llama3"](trial)
    unscaled = config.rope_parameters["rope_theta"] ** -(torch.arange(len(meant)) / len(meant))
    if len(divisors) != len(meant) or not torch.allclose(unscaled / divisors, meant, rtol=1e-4, atol=0.0):
        file.refuse(f"its positions are scaled by other factors ({LLAMA3}) than those of Llama 3")
    return more
