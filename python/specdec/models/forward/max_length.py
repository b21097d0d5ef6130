"""How many positions a model has."""

from __future__ import annotations

from transformers import PreTrainedConfig


def max_length(config: PreTrainedConfig) -> int | None:
    """Returns how many positions the model has that do not influence earlier ones; None: no limit.

    Dynamic and long RoPE change all frequencies once a forward reaches past the original length: a draft there, or
    a longer sequence of the batch, would change earlier tokens.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]  # the latter: MPT
    for r in by_layer_type:
        if r.get("rope_type") in ("dynamic", "longrope"):
            limits.append(r.get("original_max_position_embeddings"))
    return min((n for n in limits if n is not None), default=None)
