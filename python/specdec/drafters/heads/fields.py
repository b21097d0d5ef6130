"""What the entries of a head's config.json may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ... import fields
from ...checks import refuse

_COUNT = fields.Number(0, 2**16)
_ANY = fields.Number(-1e30, 1e30, whole=False)
# Of formats of heads. An MTP layer's is its target's whole configuration, whose sizes are not looked at here.
OF_HEADS: Mapping[str, fields.Field] = {
    **dict.fromkeys(("eagle_config", "dflash_config", "transformer_layer_config"), fields.OBJECT),
    **dict.fromkeys(("speculators_model_type", "markov_head_type"), fields.TEXT),
    **dict.fromkeys(
        ("use_aux_hidden_state", "norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output",
         "sample_from_anchor", "is_causal", "causal", "sliding_window_non_causal", "shift_label"), fields.FLAG,
    ),
    **dict.fromkeys(("medusa_num_heads", "medusa_num_layers", "pure_draft_prefix_len"), _COUNT),
    **dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_top_k"), fields.SIZE),
    "draft_vocab_size": fields.TOKENS,
    "target_hidden_size": fields.SIZE,
    "logit_scale": _ANY,
    "block_size": fields.Number(2, 2**12),
}  # fmt: skip
# Of layers, those that Shape reads.
OF_LAYERS: Mapping[str, fields.Field] = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), fields.SIZE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), fields.HEADS),
    "head_dim": fields.Number(0, 2**16),  # 0 is none
    "max_position_embeddings": fields.TOKENS,
    "rms_norm_eps": fields.EPSILON,
    "hidden_act": fields.TEXT,
    "model_type": fields.TEXT,
    "layer_types": fields.TEXTS,
    "sliding_window": fields.Number(0, fields.MOST),
    "kv_lora_rank": fields.Number(0, 2**24),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window", "tie_word_embeddings"), fields.FLAG),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), fields.OBJECT),
    "rope_theta": fields.POSITIVE,
    "partial_rotary_factor": fields.POSITIVE,
}
_OF_ROPES: Mapping[str, fields.Field] = {
    **dict.fromkeys(("rope_type", "type"), fields.TEXT),
    **dict.fromkeys(("rope_theta", "factor", "partial_rotary_factor"), fields.POSITIVE),
    **dict.fromkeys(
        ("low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"), fields.NOT_NEGATIVE
    ),
    **dict.fromkeys(("mscale", "mscale_all_dim"), fields.NOT_NEGATIVE),
    "original_max_position_embeddings": fields.TOKENS,
}


def without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """``null`` says that there is no such entry, as in transformers' own files; in objects within it, too."""
    there = {name: value for name, value in config.items() if value is not None}
    return {name: without_nulls(value) if isinstance(value, dict) else value for name, value in there.items()}


def check_fields(config: Mapping[str, Any], allowed: Mapping[str, fields.Field], within: str = "") -> None:
    """Checks entries, and those of objects that stand in them. Raises ValueError naming the entry."""
    for name, value, may_be in fields.wrong(config, allowed):
        refuse("config.json", f"{within}{name} {value}", may_be)
    for name in ("eagle_config", "dflash_config"):
        if name in allowed and name in config:
            check_fields(config[name], OF_HEADS, f"{name}.")
    for name in ("rope_parameters", "rope_scaling"):
        if name in allowed and name in config:
            check_fields(config[name], _OF_ROPES, f"{name}.")
