"""Which models the loop can drive: refusals by name, and a check on first use of every model type not yet known."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from .cache import VISIBLE_STEP, visible_slots
from .forward import CachedModel

# Ragged cached forwards compared with full ones in tests/test_cache.py or, for the rest, by hand in
# transformers 5.23.
KNOWN_MODEL_TYPES = frozenset(
    ("bloom", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi3", "qwen2", "qwen3")
)
REWINDABLE_LAYER_TYPES = frozenset(("full_attention", "sliding_attention"))
MASKED_ATTENTION = ("sdpa", "eager")


def cached_model(model: PreTrainedModel, name: str) -> CachedModel:
    """``model``, ready for the loop. ``name`` is the caller's argument, for errors.

    Raises:
        ValueError: the model is no causal LM, its state cannot be rewound (Mamba, hybrid, linear attention),
            it is an encoder-decoder, it is in training mode, its attention takes no 4-D mask, or, for a model
            type that was never checked, its cached forward differs from its full forward.
    """
    if not isinstance(model, PreTrainedModel):
        given = type(model).__name__
        raise ValueError(f"{name}: got {given}, allowed: a transformers causal LM")  # noqa: TRY004
    config = model.config.get_text_config(decoder=True)
    described = f"model type {config.model_type!r}"
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name}: {described} is an encoder-decoder, allowed: decoder-only models")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if model._is_stateful or not layer_types <= REWINDABLE_LAYER_TYPES:
        others = ", ".join(sorted(layer_types - REWINDABLE_LAYER_TYPES)) or "its layers"
        raise ValueError(f"{name}: {described} keeps a state that cannot be rewound ({others}), allowed: attention")
    if config.model_type == "gpt_neo":  # shorter texts than its window of 256 would pass the check
        raise ValueError(f"{name}: {described} counts its local attention from the cache's end, allowed: other models")
    if config._attn_implementation not in MASKED_ATTENTION:
        given, allowed = config._attn_implementation, " or ".join(MASKED_ATTENTION)
        raise ValueError(f"{name}: attention implementation {given!r}, allowed: {allowed}")
    if model.training:
        raise ValueError(f"{name}: is in training mode (dropout), call .eval() first")
    cached = CachedModel(model)
    if config.model_type not in KNOWN_MODEL_TYPES:
        check_against_full_forward(cached, name)
    return cached


@torch.inference_mode()
def check_against_full_forward(cached: CachedModel, name: str) -> None:
    """Compares ragged cached logits with full forwards on random tokens: two sequences, one rollback.

    Thirteen tokens do not reach past a usual sliding window: whether a model follows the rule of masking_utils
    there is not seen here.

    Raises:
        ValueError: names the model type and the largest difference.
    """
    described = f"{name}: model type {cached.config.model_type!r} cannot be driven with a static cache"
    device, lengths, fed = cached.device, (9, 6), 4
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(cached.vocab_size, (2, max(lengths) + fed), generator=generator).to(device)
    try:
        cache = cached.new_cache(2, 2 * VISIBLE_STEP)  # attention sees empty slots too
        cached.prefill(cache, [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)])
        places = cache.lengths[:, None] + torch.arange(fed, device=device)
        layout = cached.layout(places, places, visible_slots(tokens.shape[1], cache.capacity))
        cached(tokens[:, :fed].flip(1), cache, layout)  # wrong tokens, to be overwritten
        logits = cached(tokens.gather(1, places), cache, layout)
        full = [cached.model(tokens[b : b + 1, : n + fed]).logits[0, n:] for b, n in enumerate(lengths)]
    except Exception as error:  # whatever a model that was never seen does with our mask and cache
        raise ValueError(f"{described}: {type(error).__name__}: {error}") from error
    expected = torch.stack(full).float()
    difference = (logits.float() - expected).abs().max().item()
    allowed = torch.finfo(cached.dtype).eps ** 0.5 * expected.abs().max().item()
    if not difference <= allowed:
        raise ValueError(
            f"{described}: its logits differ from a full forward by up to {difference:.3g}, allowed: {allowed:.3g}"
        )
