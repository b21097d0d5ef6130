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

_HYBRID = {**DECODER, "num_hidden_layers": 3}
_RECURRENT = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA = {
    **_HYBRID,
    **_RECURRENT,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_DELTA_EXPERTS = {**_MORE_EXPERTS, "shared_expert_intermediate_size": 16}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_SHORT = {**_HYBRID, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}

# name: (model type, arguments of its configuration)
CASES: dict[str, tuple[str, dict]] = {
    "bamba": ("bamba", {**_HYBRID, **_MAMBA, "attn_layer_indices": [1]}),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, **COMMON}),
    "cohere": ("cohere", _DECODER),
    "cohere2": ("cohere2", {**_DECODER, **_MIXED}),
    "falcon": ("falcon", _FALCON),
    "falcon, ALiBi": ("falcon", {**_FALCON, "alibi": True}),
    "falcon_h1": ("falcon_h1", {**_HYBRID, **_MAMBA, "mamba_d_ssm": 64}),
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
    "granitemoehybrid": (
        "granitemoehybrid",
        {**_HYBRID, **_MAMBA, **_RECURRENT, "num_local_experts": 0, "shared_intermediate_size": 48},
    ),
    "jamba": (
        "jamba",
        {
            **_HYBRID,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 12,
        },
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            **_HYBRID,
            **_RECURRENT,
            **SHARED_EXPERTS,
            "num_key_value_heads": 4,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "lfm2": ("lfm2", {**_SHORT, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", {**_SHORT, **_MORE_EXPERTS, "num_dense_layers": 1}),
    "llama": ("llama", _DECODER),
    "llama, tied": ("llama", {**_DECODER, "tie_word_embeddings": True}),
    "mamba2": (
        "mamba2",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 12, "n_groups": 2}
        | {"chunk_size": 16, **COMMON},
    ),
    "ministral": ("ministral", {**_DECODER, **_MIXED}),
    "mistral": ("mistral", {**_DECODER, **_SLIDES}),
    "mixtral": ("mixtral", {**_DECODER, **_SLIDES, **_EXPERTS}),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": POSITIONS, **COMMON}),
    "nemotron_h": (
        "nemotron_h",
        {
            **DECODER,
            **SHARED_EXPERTS,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention", "mamba", "moe"],
            "moe_shared_expert_intermediate_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 12,
            "time_step_min": 1e-30,  # transformers bounds prompts by it, and not steps
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "olmo": ("olmo", _DECODER),
    "olmo2": ("olmo2", _DECODER),
    "olmo3": ("olmo3", {**_DECODER, **_MIXED}),
    "olmo_hybrid": ("olmo_hybrid", {**_DELTA, "num_key_value_heads": 4, "linear_num_key_heads": 4}),
    "opt": ("opt", {**_DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi": ("phi", _DECODER),
    "phi3": ("phi3", {**_DECODER, **_SLIDES}),
    "qwen2": ("qwen2", {**_DECODER, **_QWEN_MIXED}),
    "qwen2_moe": ("qwen2_moe", {**_DECODER, **_MORE_EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3": ("qwen3", {**_DECODER, **_QWEN_MIXED}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**_DELTA, **_DELTA_EXPERTS}),
    "qwen3_5_text": ("qwen3_5_text", _DELTA),
    "qwen3_moe": ("qwen3_moe", {**_DECODER, **_MORE_EXPERTS}),
    "qwen3_next": ("qwen3_next", {**_DELTA, **_DELTA_EXPERTS}),
    "smollm3": ("smollm3", _DECODER),
    "stablelm": ("stablelm", _DECODER),
    "starcoder2": ("starcoder2", {**_DECODER, **_SLIDES}),
    "zamba2": (
        "zamba2",
        {
            **_HYBRID,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "layer_types": ["linear_attention", "hybrid", "linear_attention"],
            "mamba_d_state": 12,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "time_step_min": 1e-30,
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "adapter_rank": 4,
        },
    ),
}
# Types with recurrent layers.
HYBRID = (
    "bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba2", "nemotron_h",
    "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2",
)  # fmt: skip


@functools.cache
@torch.inference_mode(False)  # whoever asks for it first, since others train it
def model_of(case: str) -> PreTrainedModel:
    """A tiny model with random weights, drawn wider than usual, those of attention sinks and time steps as well.
    It is cached, so it must not be changed in place."""
    model_type, settings = CASES[case]
    config = CONFIG_MAPPING[model_type](**settings)
    torch.manual_seed(0)
    new = Gemma3ForConditionalGeneration if model_type == "gemma3" else AutoModelForCausalLM.from_config
    return draw_wide(new(config).eval())


def draw_wide(model: PreTrainedModel) -> PreTrainedModel:
    """Draws the weights of a new model wider than usual."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.0 if "emb" in name or "wte" in name else 0.3)
            elif "sinks" in name or "dt_" in name:
                weight.normal_()
    return model
