"""What the keys of a GGUF file may say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ....fields import (
    EPSILON,
    FLAG,
    HEADS,
    MOST,
    NOT_NEGATIVE,
    NUMBERS,
    POSITIVE,
    SIZE,
    TEXT,
    TEXTS,
    TOKENS,
    Field,
    Number,
    wrong,
)  # fmt: skip

_ID = Number(-1, 2**32 - 1)  # one that the vocabulary does not have counts as none
OF_MODEL: Mapping[str, Field] = {
    "block_count": Number(1, 2**16),
    "context_length": TOKENS,
    "embedding_length": SIZE,
    "feed_forward_length": SIZE,
    "attention.head_count": HEADS,
    "attention.head_count_kv": HEADS,
    "attention.key_length": HEADS,
    "attention.value_length": HEADS,
    "attention.layer_norm_rms_epsilon": EPSILON,
    "attention.sliding_window": Number(0, MOST),
    "attention.sliding_window_pattern": TOKENS,
    "attn_logit_softcapping": NOT_NEGATIVE,
    "final_logit_softcapping": NOT_NEGATIVE,
    "rope.dimension_count": HEADS,
    "rope.freq_base": POSITIVE,
    "rope.freq_base_swa": POSITIVE,
    "rope.scaling.type": TEXT,
    "rope.scaling.factor": NOT_NEGATIVE,
    "rope.scaling.original_context_length": Number(0, MOST),
    "rope.scaling.attn_factor": NOT_NEGATIVE,
    "rope.scaling.yarn_beta_fast": NOT_NEGATIVE,
    "rope.scaling.yarn_beta_slow": NOT_NEGATIVE,
    "rope.scaling.finetuned": FLAG,
}
OF_FILE: Mapping[str, Field] = {
    "general.architecture": TEXT,
    "split.count": Number(0, 2**16 - 1),
    "tokenizer.chat_template": TEXT,
    "tokenizer.ggml.model": TEXT,
    "tokenizer.ggml.pre": TEXT,
    "tokenizer.ggml.tokens": TEXTS,
    "tokenizer.ggml.merges": TEXTS,
    "tokenizer.ggml.scores": NUMBERS,
    "tokenizer.ggml.token_type": NUMBERS,
    **{f"tokenizer.ggml.{name}_token_id": _ID for name in ("bos", "eos", "eot", "eom", "unknown", "padding")},
    **{f"tokenizer.ggml.add_{name}": FLAG for name in ("bos_token", "eos_token", "space_prefix")},
}


def wrong_keys(metadata: Mapping[str, Any], tensors: int) -> Iterator[str]:
    """Yields what is wrong with a key that is there. ``tensors``: how many the file has, some for each block."""
    architecture = metadata.get("general.architecture")
    of_model = {f"{architecture}.{key}": field for key, field in OF_MODEL.items()}
    for name, value, allowed in wrong(metadata, {**OF_FILE, **of_model}):
        yield f"{name} is {value}, and has to be {allowed}"
    blocks = metadata.get(f"{architecture}.block_count")
    if isinstance(blocks, int) and blocks > max(tensors, 1):
        yield f"{architecture}.block_count is {blocks}, and it has {tensors} tensors"
