"""A tiny configuration of every tested model type, with what is particular to it."""

from __future__ import annotations

import functools

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Gemma3ForConditionalGeneration, PreTrainedModel

from .models import COMMON, DECODER, POSITIONS, WINDOW

_DECODER = {"num_hidden_layers": 2, **DECODER}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS, **COMMON}
_FALCON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **COMMON}
_SLIDES = {"sliding_window": WINDOW}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], **_SLIDES}
_QWEN_MIXED = {"use_sliding_window": True, "max_window_layers": 1, **_SLIDES}
_GEMMA = {"query_pre_attn_scalar": 8, **_MIXED}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MORE_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_SIGHT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

# name: (model type, arguments of its configuration)
CASES: dict[str, tuple[str, dict]] = {
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, **COMMON}),
    "cohere": ("cohere", _DECODER),
    "cohere2": ("cohere2", {**_DECODER, **_MIXED}),
    "falcon": ("falcon", _FALCON),
    "falcon, ALiBi": ("falcon", {**_FALCON, "alibi": True}),
    "gemma, one key head": ("gemma", {**_DECODER, "num_key_value_heads": 1}),
    "gemma2": ("gemma2", {**_DECODER, **_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": (
        "gemma3",
        {
            "text_config": {**_DECODER, **_GEMMA},
            "vision_config": _SIGHT,
            "mm_tokens_per_image": 4,
            "image_token_index": 100,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3_text": ("gemma3_text", {**_DECODER, **_GEMMA, "num_key_value_heads": 1}),
    "glm": ("glm", _DECODER),
    "glm4": ("glm4", _DECODER),
    "glm4_moe": ("glm4_moe", {**_DECODER, **SHARED_EXPERTS, "use_qk_norm": True}),
    "gpt2": ("gpt2", _GPT2),
    "gpt_bigcode": ("gpt_bigcode", _GPT2),  # one key head
    "gpt_neox": ("gpt_neox", _DECODER),
    "gpt_oss": ("gpt_oss", {**_DECODER, **_MIXED, **_EXPERTS, "rope_parameters": _ROPE}),
    "gptj": ("gptj", {**_GPT2, "rotary_dim": 4}),
    "granite": ("granite", {**_DECODER, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "granitemoe": ("granitemoe", {**_DECODER, **_EXPERTS}),
    "llama": ("llama", _DECODER),
    "llama, tied": ("llama", {**_DECODER, "tie_word_embeddings": True}),
    "ministral": ("ministral", {**_DECODER, **_MIXED}),
    "mistral": ("mistral", {**_DECODER, **_SLIDES}),
    "mixtral": ("mixtral", {**_DECODER, **_SLIDES, **_EXPERTS}),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": POSITIONS, **COMMON}),
    "olmo": ("olmo", _DECODER),
    "olmo2": ("olmo2", _DECODER),
    "olmo3": ("olmo3", {**_DECODER, **_MIXED}),
    "opt": ("opt", {**_DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi": ("phi", _DECODER),
    "phi3": ("phi3", {**_DECODER, **_SLIDES}),
    "qwen2": ("qwen2", {**_DECODER, **_QWEN_MIXED}),
    "qwen2_moe": ("qwen2_moe", {**_DECODER, **_MORE_EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3": ("qwen3", {**_DECODER, **_QWEN_MIXED}),
    "qwen3_moe": ("qwen3_moe", {**_DECODER, **_MORE_EXPERTS}),
    "smollm3": ("smollm3", _DECODER),
    "stablelm": ("stablelm", _DECODER),
    "starcoder2": ("starcoder2", {**_DECODER, **_SLIDES}),
}


@functools.cache
@torch.inference_mode(False)  # whoever asks for it first, since others train it
def model_of(case: str) -> PreTrainedModel:
    """A tiny model with random weights, which are drawn wider than usual, those of norms and attention sinks as well.
    It is cached, so it must not be changed in place."""
    model_type, settings = CASES[case]
    config = CONFIG_MAPPING[model_type](**settings)
    torch.manual_seed(0)
    new = Gemma3ForConditionalGeneration if model_type == "gemma3" else AutoModelForCausalLM.from_config
    model = new(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.0 if "emb" in name or "wte" in name else 0.3)
            elif "sinks" in name:
                weight.normal_()
    return model
