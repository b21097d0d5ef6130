"""Writes tiny models as GGUF files, the way in which llama.cpp's converter does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

gguf = pytest.importorskip("gguf")  # a file of tests that imports this one is skipped
_names = functools.cache(gguf.get_tensor_name_map)  # which takes long to make, and is asked for each tensor
TURN = "<|im_end|>"
TOKENS = ("<s>", "</s>", TURN, *bytes_to_unicode().values(), "in", "12")
_PIECES = ("<unk>", "<s>", "</s>", "▁", "i", "n", "s", "o", "in", "▁in", "so", "▁so", "  ", "1")
SPM = (*_PIECES, *(f"<0x{i:02X}>" for i in range(len(TOKENS) - len(_PIECES))))
TEMPLATE = "{% for m in messages %}{{ m.content }}" + TURN + "{% endfor %}"
_SIZES = {
    "vocab_size": len(TOKENS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "rms_norm_eps": float(np.float32(1e-5)), "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1,
    "sliding_window": 8,
}  # fmt: skip
# Of each architecture, what is particular.
MODELS: Mapping[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e4, "tie_word_embeddings": False, "sliding_window": None},
    "qwen2": {"head_dim": 8, "rope_theta": 1e6, "sliding_window": None},
    "qwen3": {"rope_theta": 1e6, "tie_word_embeddings": True, "sliding_window": None},
    "gemma2": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {"num_hidden_layers": 6, "query_pre_attn_scalar": 16, "rope_theta": 1e6},
    "phi3": {"head_dim": 8, "rope_theta": 2e4, "tie_word_embeddings": False},
}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}  # rows of a block of 256


@functools.cache
@torch.inference_mode(False)
def tiny(kind: str) -> PreTrainedModel:
    """A random model of this type, not to be changed."""
    torch.manual_seed(0)
    wide = WIDE if kind == "llama, wide" else {}
    kind = kind.partition(",")[0]
    config = AutoConfig.for_model(kind, **{**_SIZES, **MODELS[kind], **wide}, attn_implementation="eager")
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
    stored: str = "F32",
) -> PreTrainedModel:
    """Writes the model of this type, and returns that which the file says: of the numbers that its blocks stand for.

    Args:
        metadata, tensors: that are added, or replace those of the model; a value None leaves one out. The keys of the
            model are written without the architecture.
        without: names of tensors that are left out.
        stored: the type of matrices; of those whose rows are no whole blocks of it, Q8_0.
    """
    model = copy.deepcopy(tiny(kind))
    architecture = kind.partition(",")[0].removesuffix("_text")
    writer = gguf.GGUFWriter(path, architecture)
    of_tokenizer = OF_SPM if architecture.startswith(("gemma", "phi")) else OF_BPE
    for key, value in {**_of_model(model, architecture), **of_tokenizer, **(metadata or {})}.items():
        whole = key if key.startswith(("tokenizer.", "split.", "general.")) else f"{architecture}.{key}"
        if value is not None:
            _add(writer, whole, value)
    for name, weight in model.state_dict().items():
        of_file, of_type = _name(name, model, architecture), gguf.GGMLQuantizationType[stored]
        if of_file in without or (name == "lm_head.weight" and model.config.tie_word_embeddings):
            continue
        if weight.ndim < 2:
            of_type = gguf.GGMLQuantizationType.F32
        elif weight.shape[1] % gguf.GGML_QUANT_SIZES[of_type][0]:
            of_type = gguf.GGMLQuantizationType.Q8_0
        more = architecture.startswith("gemma") and name.endswith("norm.weight")  # a file has what is multiplied by
        rows = blocks(weight.numpy() + 1 if more else weight.numpy(), of_type)
        with torch.no_grad():
            weight.copy_(torch.from_numpy(gguf.dequantize(rows, of_type) - more))
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):  # llama.cpp rotates neighbours
            heads = rows.shape[0] // model.config.head_dim
            rows = rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        writer.add_tensor(of_file, rows.copy(), raw_dtype=of_type)
    for name, weight in (tensors or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def blocks(weight: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Rows of this type near ``weight``, or, where gguf cannot make them, any."""
    try:
        return gguf.quantize(weight, kind)
    except NotImplementedError:
        numbers, size = gguf.GGML_QUANT_SIZES[kind]
        random = np.random.default_rng(weight.size)
        rows = random.integers(0, 256, (*weight.shape[:-1], weight.shape[-1] // numbers, size), np.uint8)
        scales = random.uniform(1e-4, 5e-4, (*rows.shape[:-1], 2)).astype(np.float16).view(np.uint8)
        if kind == gguf.GGMLQuantizationType.Q6_K:  # its scale comes last
            rows[..., -2:] = scales[..., :2]
        else:
            rows[..., :4] = scales
        return rows.reshape(*weight.shape[:-1], -1)


OF_BPE: dict[str, Any] = {
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
OF_SPM: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": list(SPM),
    "tokenizer.ggml.token_type": [2, 3, 3, *([1] * (len(_PIECES) - 3)), *([6] * (len(SPM) - len(_PIECES)))],
    "tokenizer.ggml.scores": [-float(i) for i in range(len(SPM))],
    "tokenizer.ggml.merges": None,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.ggml.add_bos_token": None,
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


def _name(name: str, model: PreTrainedModel, architecture: str) -> str:
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    stem, _, suffix = name.rpartition(".")
    return f"{_names(kind, model.config.num_hidden_layers).get_name(stem)}.{suffix}"


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if key == "general.alignment":
        return writer.add_custom_alignment(value)
    whole = "uint64" if isinstance(value, int) and value >= 2**32 else "uint32"
    whole = "int32" if isinstance(value, int) and value < 0 else whole
    kinds = ((bool, "bool"), (str, "string"), (int, whole), (float, "float32"), (list, "array"))
    return getattr(writer, "add_" + next(name for kind, name in kinds if isinstance(value, kind)))(key, value)
