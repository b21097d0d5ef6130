"""Writes tiny models as GGUF files, the way in which llama.cpp's converter does."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

TURN = "<|im_end|>"
TOKENS = ("<s>", "</s>", TURN, *bytes_to_unicode().values(), "in", "12")
TEMPLATE = "{% for m in messages %}{{ m.content }}" + TURN + "{% endfor %}"
_SIZES = {
    "vocab_size": len(TOKENS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1, "sliding_window": 8,
}  # fmt: skip
# Of each architecture, what is particular.
MODELS: Mapping[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e4, "tie_word_embeddings": False},
    "qwen2": {"head_dim": 8, "rope_theta": 1e6, "sliding_window": None},
    "qwen3": {"rope_theta": 1e6, "tie_word_embeddings": True, "sliding_window": None},
    "gemma2": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {"num_hidden_layers": 6, "query_pre_attn_scalar": 16, "rope_theta": 1e6},
    "phi3": {"head_dim": 8, "rope_theta": 2e4, "tie_word_embeddings": False},
}


@functools.cache
@torch.inference_mode(False)
def tiny(kind: str) -> PreTrainedModel:
    """A random model of this type, not to be changed."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**_SIZES, **MODELS[kind]}, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():  # those of norms and biases as well, or a file could lack them unnoticed
            weight.normal_(std=0.3)
    return model


def write_gguf(
    path: Path,
    kind: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
    packed: bool = False,
) -> PreTrainedModel:
    """Writes the model of this type, and returns it.

    Args:
        metadata, tensors: that are added, or replace those of the model; a value None leaves one out. The keys of the
            model are written without the architecture.
        without: names of tensors that are left out.
        packed: writes what is a matrix as Q8_0.
    """
    model = tiny(kind)
    architecture = kind.removesuffix("_text")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_of_model(model, architecture), **_OF_TOKENIZER, **(metadata or {})}.items():
        whole = key if key.startswith(("tokenizer.", "split.", "general.")) else f"{architecture}.{key}"
        if value is not None:
            _add(writer, whole, value)
    for name, weight in {**_tensors(model, architecture), **(tensors or {})}.items():
        if name in without:
            continue
        if packed and weight.ndim == 2:
            kind_of = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(weight, kind_of), raw_dtype=kind_of)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


_OF_TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": list(TOKENS),
    "tokenizer.ggml.token_type": [3, 3, 3, *([1] * (len(TOKENS) - 3))],
    "tokenizer.ggml.merges": ["i n", "1 2"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": TEMPLATE,
}


def _of_model(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    c = model.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    parameters = c.rope_parameters
    theta = parameters.get("full_attention", parameters)["rope_theta"]
    keys = {
        "context_length": c.max_position_embeddings,
        "block_count": c.num_hidden_layers,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.freq_base": float(theta),
    }
    if architecture in ("llama", "phi3"):
        keys["rope.dimension_count"] = head_dim
    if architecture in ("qwen3", "gemma2", "gemma3"):
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if architecture in ("gemma2", "gemma3", "phi3"):
        keys["attention.sliding_window"] = c.sliding_window
    if architecture == "gemma2":
        keys |= {name: getattr(c, name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    return keys


def _tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    found = {}
    for name, weight in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        if stem == "lm_head" and model.config.tie_word_embeddings:
            continue
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):  # llama.cpp rotates neighbours
            heads = weight.shape[0] // model.config.head_dim
            weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        if architecture.startswith("gemma") and "norm" in stem:
            weight = weight + 1
        found[f"{names.get_name(stem)}.{suffix}"] = weight.detach().numpy().copy()
    return found


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = ((bool, "bool"), (str, "string"), (int, "uint32"), (float, "float32"), (list, "array"))
    getattr(writer, "add_" + next(name for kind, name in kinds if isinstance(value, kind)))(key, value)
