"""The configuration that a GGUF file describes: by transformers' table of keys, and what that leaves out."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

from ....checks import one_line
from .file import GgufFile
from .rope import KEYS, scale_positions

# Keys that transformers' table does not have, and the entries of the configuration that are set from them.
_SET = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_NEEDED = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)  # fmt: skip
_WINDOWED = ("gemma2", "gemma3", "phi3")  # whose layers have windows in transformers


def configuration(file: GgufFile) -> PreTrainedConfig:
    """Raises ValueError naming the file: it says something of its model that cannot be expressed."""
    said, table = file.of_model(), _table(file)
    known = {*table, *_SET, *_AGREED, *KEYS}
    if file.architecture != "gemma3":
        known -= {"rope.freq_base_swa", "attention.sliding_window_pattern"}
    if file.architecture not in _WINDOWED:
        known -= {"attention.sliding_window"}
    if not file.architecture.startswith("gemma"):
        known -= {"attn_logit_softcapping", "final_logit_softcapping"}
    if unread := sorted(key for key, value in said.items() if key not in known and value not in (0, None)):
        file.refuse(f"it says {', '.join(f'{file.architecture}.{key}' for key in unread)}, which is not read")
    for key in _NEEDED:
        if key not in said:
            file.refuse(f"it does not say {file.architecture}.{key}, which is needed")
    # llama.cpp's defaults, which are not those of every configuration.
    values: dict[str, Any] = {"num_key_value_heads": said["attention.head_count"], "rope_theta": 10000.0}
    values["vocab_size"] = len(file.of_tokenizer("tokens"))
    values |= {entry: said[key] for key, entry in table.items() if entry is not None and key in said}
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    kind = "gemma3_text" if file.architecture == "gemma3" else file.architecture
    try:
        config: Any = AutoConfig.for_model(kind, **values)
        config.dtype, config.name_or_path = torch.float32, str(file.path)
        _complete(config, file)
    except Exception as error:  # of transformers' checks, which have classes of their own
        file.refuse(f"transformers refuses its sizes: {one_line(error)}")
    scale_positions(config, file)
    _require_agreement(config, file)
    return config


def _table(file: GgufFile) -> dict[str, str | None]:
    tables: Any = GGUF_TO_TRANSFORMERS_MAPPING["config"]
    return tables[file.architecture]


def _complete(config: Any, file: GgufFile) -> None:
    """Sets what would stay at the defaults of the configuration's class though the file says it."""
    for key, value in file.of_model().items():
        if key in _SET:
            setattr(config, _SET[key], value)
    if hasattr(config, "query_pre_attn_scalar"):  # no file says it; llama.cpp knows the models of 27B by their layers
        large = config.num_hidden_layers in (46, 62)
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if large else config.head_dim
    for name, key in (("bos", "bos"), ("pad", "padding"), ("unk", "unknown")):
        setattr(config, f"{name}_token_id", file.token_id(key))
    ends = file.ends
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None


def _require_agreement(config: Any, file: GgufFile) -> None:
    for key, value in file.of_model().items():
        if key in _AGREED and (own := _AGREED[key](config)) != value:
            file.refuse(f"{file.architecture}.{key} is {value}, transformers has {own}")


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rotated(config: Any) -> int:
    parameters = config.rope_parameters.get("full_attention", config.rope_parameters)
    return int(_head_dim(config) * parameters.get("partial_rotary_factor", 1.0))


_AGREED = {
    "attention.value_length": _head_dim,
    "rope.dimension_count": _rotated,
    "rope.freq_base_swa": lambda config: config.rope_parameters["sliding_attention"]["rope_theta"],
    "attention.sliding_window_pattern": lambda config: config._sliding_window_pattern,
}
