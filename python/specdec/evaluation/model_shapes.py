"""The shape of a model for roofline.py: from its configuration, without its weights, or from a number of parameters."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from ..checks import refuse
from .roofline import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Of Llama-3 models, from which the shape of a model is guessed of which only the size is known.
LIKE_PARAMETERS, LIKE_LAYERS, LIKE_KV, LIKE_VOCABULARY = 8.0e9, 32, 2 * 8 * 128, 128256
LAYERS_EXPONENT = 0.35  # 1.2, 3.2, 8, 70 and 405 billion parameters have 16, 28, 32, 80 and 126 layers
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def read_shape(name: str, given: str, weight_bits: int, number_bits: int) -> ModelShape:
    """Returns the shape of a folder, hub name or GGUF file, or of a size such as 8B, 500M or 7e9.

    Args:
        name: of the argument, for errors.
        weight_bits, number_bits: of a weight, and of keys, values and logits.

    Raises:
        ValueError, OSError: names ``name``.
    """
    size = parameters_of(given)
    shape = _of_configuration(name, given) if size is None else of_parameters(given, size)
    return replace(shape, weight_bytes=weight_bits / 8, number_bytes=number_bits / 8)


def parameters_of(given: str) -> float | None:
    """The number of a size; None: it is none."""
    match = re.fullmatch(r"([0-9]+(?:[.][0-9]+)?(?:e[0-9]+)?)([KMBT]?)", given.strip(), re.IGNORECASE)
    size = float(match[1]) * UNITS[match[2].upper()] if match else 0.0
    return size if size >= 1 else None


def of_parameters(name: str, parameters: float) -> ModelShape:
    """A decoder like Llama 3's. Layers and keys and values may be off by a quarter, which matters for long contexts."""
    layers = max(1, round(LIKE_LAYERS * (parameters / LIKE_PARAMETERS) ** LAYERS_EXPONENT))
    hidden = (parameters / (12 * layers)) ** 0.5
    return ModelShape(
        name, int(parameters), int(parameters), layers, int(layers * hidden), layers * LIKE_KV, LIKE_VOCABULARY
    )


def _of_configuration(name: str, path: str) -> ModelShape:
    from ..models.load.loading import read_config

    config = read_config(name, path)
    try:
        shape = shape_of(config, path)
    except (OSError, ValueError, AttributeError) as error:
        raise OSError(f"{name}: cannot read {path!r}: {error}") from error
    if shape is None:
        refuse(name, repr(path), "a model without experts: which weights a step reads would depend on its tokens")
    return shape


def shape_of(config: PreTrainedConfig, name: str) -> ModelShape | None:
    """The shape of a model with this configuration, whose weights are counted without storage; None: it has experts.
    Every layer is taken to attend to the whole context."""
    import torch
    from transformers import AutoModelForCausalLM

    text = config.get_text_config(decoder=True)
    if any((getattr(text, experts, None) or 0) > 1 for experts in EXPERTS):
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    heads, layers = text.num_attention_heads, text.num_hidden_layers
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return ModelShape(
        name=name,
        parameters=parameters,
        read=parameters if tied else parameters - embedding.numel(),
        layers=layers,
        attended=layers * heads * head_size,
        cached=2 * layers * kv_heads * head_size,
        vocabulary=text.vocab_size,
    )
