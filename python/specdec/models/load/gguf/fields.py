"""What the keys of a GGUF file may say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .... import fields

_ID = fields.Number(-1, 2**32 - 1)  # one that the vocabulary does not have counts as none
OF_MODEL: Mapping[str, fields.Field] = {
    "block_count": fields.Number(1, 2**16),
    "context_length": fields.TOKENS,
    "embedding_length": fields.SIZE,
    "feed_forward_length": fields.SIZE,
    "attention.head_count": fields.HEADS,
    "attention.head_count_kv": fields.HEADS,
    "attention.key_length": fields.HEADS,
    "attention.value_length": fields.HEADS,
    "attention.layer_norm_rms_epsilon": fields.EPSILON,
    "attention.sliding_window": fields.Number(0, fields.MOST),
    "attention.sliding_window_pattern": fields.TOKENS,
    "attn_logit_softcapping": fields.NOT_NEGATIVE,
    "final_logit_softcapping": fields.NOT_NEGATIVE,
    "rope.dimension_count": fields.HEADS,
    "rope.freq_base": fields.POSITIVE,
    "rope.freq_base_swa": fields.POSITIVE,
    "rope.scaling.type": fields.TEXT,
    "rope.scaling.factor": fields.NOT_NEGATIVE,
    "rope.scaling.original_context_length": fields.Number(0, fields.MOST),
    "rope.scaling.attn_factor": fields.NOT_NEGATIVE,
    "rope.scaling.yarn_beta_fast": fields.NOT_NEGATIVE,
    "rope.scaling.yarn_beta_slow": fields.NOT_NEGATIVE,
    "rope.scaling.finetuned": fields.FLAG,
}
OF_FILE: Mapping[str, fields.Field] = {
    "general.architecture": fields.TEXT,
    "split.count": fields.Number(0, 2**16 - 1),
    "tokenizer.chat_template": fields.TEXT,
    "tokenizer.ggml.model": fields.TEXT,
    "tokenizer.ggml.pre": fields.TEXT,
    "tokenizer.ggml.tokens": fields.TEXTS,
    "tokenizer.ggml.merges": fields.TEXTS,
    "tokenizer.ggml.scores": fields.NUMBERS,
    "tokenizer.ggml.token_type": fields.NUMBERS,
    **{f"tokenizer.ggml.{name}_token_id": _ID for name in ("bos", "eos", "eot", "eom", "unknown", "padding")},
    **{f"tokenizer.ggml.add_{name}": fields.FLAG for name in ("bos_token", "eos_token", "space_prefix")},
}


def wrong_keys(metadata: Mapping[str, Any], tensors: int) -> Iterator[str]:
    """Yields what is wrong with a key that is there. ``tensors``: how many the file has, some for each block."""
    architecture = metadata.get("general.architecture")
    of_model = {f"{architecture}.{key}": field for key, field in OF_MODEL.items()}
    for name, value, allowed in fields.wrong(metadata, {**OF_FILE, **of_model}):
        yield f"{name} is {value}, and has to be {allowed}"
    blocks = metadata.get(f"{architecture}.block_count")
    if isinstance(blocks, int) and blocks > max(tensors, 1):
        yield f"{architecture}.block_count is {blocks}, and it has {tensors} tensors"
