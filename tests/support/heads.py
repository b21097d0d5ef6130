"""A target whose next token is predictable, and heads that predict it exactly.

The target knows two tokens: its residual stream has x[t] and x[t - 1] as two one-hot codes, the first one permuted anew
by every layer. So a head that reads the wrong layer decodes the wrong token, and one that feeds back the wrong state
loses a token.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

V = 32
HIDDEN = 2 * V  # the codes of x[t] and x[t - 1]
LAYERS = 7
SHARP = 300.0  # makes attention read one position

SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": HIDDEN,
    "max_position_embeddings": 512,
    "vocab_size": V,
    "rms_norm_eps": 1e-6,
}


def permutation(layer: int) -> torch.Tensor:
    """[V, V]: takes the code of a token to its code in hidden states ``layer``."""
    generator = torch.Generator().manual_seed(100 + layer)
    return torch.eye(V)[torch.randperm(V, generator=generator)] if layer else torch.eye(V)


def affinities(order: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[V, V] each: the logits of the next token, by x[t] and by x[t - 1]."""
    generator = torch.Generator().manual_seed(7)
    now, before = torch.randn(2, V, V, generator=generator)
    return (4 * now, 0 * before) if order == 1 else (2 * now, 5 * before)


def looking_back(distance: int, factor: float = SHARP) -> tuple[torch.Tensor, torch.Tensor]:
    """Biases of queries and keys with which attention reads the token ``distance`` before."""
    angles = distance * 10000.0 ** (-torch.arange(HIDDEN // 2) * 2 / HIDDEN)
    ones = torch.ones(HIDDEN // 2)
    return torch.cat((angles.cos(), -angles.sin())) * factor, torch.cat((ones, 0 * ones))


@functools.cache
@torch.inference_mode(False)  # whoever asks for it first, since others train it
def predictable_target(order: int = 2) -> PreTrainedModel:
    """Its logits depend on the last ``order`` tokens."""
    config = Qwen2Config(num_hidden_layers=LAYERS, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
                         pad_token_id=None, **SIZES)  # fmt: skip
    config.head_dim = HIDDEN
    model = Qwen2ForCausalLM(config).eval()
    now, before = affinities(order)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, :V] = torch.eye(V)
        for i, layer in enumerate(model.model.layers):
            scale = ((1 if i == 0 else 2) / HIDDEN) ** 0.5  # undoes the norm
            attention = layer.self_attn
            for head, distance in enumerate((0, 1)):
                rows = slice(head * HIDDEN, (head + 1) * HIDDEN)
                attention.q_proj.bias[rows], attention.k_proj.bias[rows] = looking_back(distance)
                attention.o_proj.weight[:, rows] = torch.eye(HIDDEN)
            change = permutation(i + 1) @ permutation(i).T - torch.eye(V)
            attention.v_proj.weight[:V, :V] = scale * change
            if i == 0:
                attention.v_proj.weight[HIDDEN + V :, :V] = scale * torch.eye(V)
        scale = (2 / HIDDEN) ** 0.5
        model.lm_head.weight[:] = scale * torch.cat((now @ permutation(LAYERS).T, before), 1)
    return model


def write(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plain_layer(prefix: str, hidden: int = HIDDEN) -> dict[str, torch.Tensor]:
    """A layer that adds nothing."""
    sizes = {"gate_proj": (8, hidden), "up_proj": (8, hidden), "down_proj": (hidden, 8)}
    tensors = {f"{prefix}.mlp.{name}.weight": torch.zeros(size) for name, size in sizes.items()}
    return tensors | {f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden)}


def exact_eagle3(states: tuple[int, ...] = (2, 3, 5), noise: float = 0.0) -> tuple[dict, dict[str, torch.Tensor]]:
    """(config.json, tensors) of a head that predicts the target exactly, as SpecForge writes it. Token x is decoded
    from state number x mod n. ``noise`` is added to its output matrix."""
    fc = torch.zeros(HIDDEN, len(states) * HIDDEN)
    for n, state in enumerate(states):
        own = (torch.arange(V) % len(states) == n)[:, None]
        fc[:V, n * HIDDEN : n * HIDDEN + V] = permutation(state).T * own
        fc[V:, n * HIDDEN + V : (n + 1) * HIDDEN] = torch.eye(V) / len(states)
    eye, of_token, of_feature = torch.eye(V), (1 / HIDDEN) ** 0.5, (2 / HIDDEN) ** 0.5
    v = torch.zeros(2 * HIDDEN, 2 * HIDDEN)
    v[:V, :V], v[:V, HIDDEN : HIDDEN + V] = of_token * eye, -of_feature * eye  # x[t + 1] instead of x[t]
    v[V:HIDDEN, HIDDEN : HIDDEN + V], v[V:HIDDEN, HIDDEN + V :] = of_feature * eye, -of_feature * eye
    query, key = looking_back(0)
    o = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), 1)
    now, before = affinities(2)
    head = of_feature * torch.cat((now, before), 1)
    head = head + noise * torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
    tensors = {
        "fc.weight": fc,
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.self_attn.q_proj.weight": torch.zeros(2 * HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.q_proj.bias": torch.cat((query, query)),
        "midlayer.self_attn.k_proj.weight": torch.zeros(2 * HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.bias": torch.cat((key, key)),
        "midlayer.self_attn.v_proj.weight": v,
        "midlayer.self_attn.v_proj.bias": torch.zeros(2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": o,
        **plain_layer("midlayer"),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
        "t2d": torch.ones(V, dtype=torch.bool),
        "d2t": torch.zeros(V, dtype=torch.int64),
    }
    nested: dict = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in states], "use_aux_hidden_state": True}
    return {
        **SIZES,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": V,
        "eagle_config": nested,
    }, tensors


def exact_eagle() -> tuple[dict, dict[str, torch.Tensor]]:
    """The same as EAGLE-1."""
    fc, scale = torch.zeros(HIDDEN, 2 * HIDDEN), (HIDDEN / 2) ** 0.5
    fc[:V, :V] = scale * permutation(LAYERS)
    fc[V:, HIDDEN : HIDDEN + V] = permutation(LAYERS).T
    tensors = {"fc.weight": fc, "fc.bias": torch.zeros(HIDDEN), **plain_layer("layers.0")}
    for name in ("q_proj", "k_proj", "v_proj"):
        tensors[f"layers.0.self_attn.{name}.weight"] = torch.zeros(2 * HIDDEN, HIDDEN)
    tensors["layers.0.self_attn.o_proj.weight"] = torch.zeros(HIDDEN, 2 * HIDDEN)
    return {**SIZES, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, tensors


def exact_mtp() -> tuple[dict, dict[str, torch.Tensor]]:
    """The same as an MTP layer in DeepSeek's layout. The signs in its norms tell which states they were applied to."""
    change, root, ones = torch.zeros(HIDDEN, 2 * HIDDEN), f"model.layers.{LAYERS}", torch.ones(HIDDEN)
    change[:V, :V] = -permutation(LAYERS) / HIDDEN**0.5
    change[V:, HIDDEN : HIDDEN + V] = -permutation(LAYERS).T / V**0.5
    layer = plain_layer(root) | {f"{root}.input_layernorm.weight": ones}
    for name in ("q_proj", "k_proj", "v_proj"):
        layer |= {f"{root}.self_attn.{name}.weight": torch.zeros(2 * HIDDEN, HIDDEN)}
        layer |= {f"{root}.self_attn.{name}.bias": torch.zeros(2 * HIDDEN)}
    tensors = {
        f"{root}.enorm.weight": ones,
        f"{root}.hnorm.weight": -ones,
        f"{root}.eh_proj.weight": change,
        f"{root}.self_attn.o_proj.weight": torch.zeros(HIDDEN, 2 * HIDDEN),
        f"{root}.shared_head.norm.weight": torch.cat((-ones[:V], ones[V:])),
    }
    return {**SIZES, "num_nextn_predict_layers": 1}, tensors | layer


def exact_medusa(heads: int = 3) -> tuple[dict, dict[str, torch.Tensor]]:
    """For the target of order 1."""
    now, _ = affinities(1)
    following, row = now.argmax(0), torch.arange(V)
    tensors = {}
    for i in range(heads):
        row = following[row]
        weight = torch.cat((now[:, row] @ permutation(LAYERS).T, torch.zeros(V, V)), 1)
        tensors[f"{i}.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN)
        tensors[f"{i}.0.linear.bias"] = torch.zeros(HIDDEN)
        tensors[f"{i}.1.weight"] = (2 / HIDDEN) ** 0.5 * weight
    return {"medusa_num_heads": heads, "medusa_num_layers": 1, "base_model_name_or_path": "target"}, tensors


def random_head(kind: str, hidden: int = HIDDEN, vocab: int = V) -> tuple[dict, dict[str, torch.Tensor]]:
    """A P-EAGLE or DFlash head, or one that walks through DFlash's block, whose drafts are accepted by chance."""
    block = kind != "peagle"
    inputs, generator = hidden if block else 2 * hidden, torch.Generator().manual_seed(0)
    shapes = {"fc.weight": (hidden, 2 * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    if not block:
        shapes |= {"mask_hidden": (1, 1, 2 * hidden), "layers.0.hidden_norm.weight": (hidden,)}
        del shapes["hidden_norm.weight"]
    shapes |= {f"layers.0.self_attn.{n}_proj.weight": (2 * hidden, inputs) for n in "qkv"}
    shapes |= {"layers.0.self_attn.o_proj.weight": (hidden, 2 * hidden), "layers.0.input_layernorm.weight": (hidden,)}
    if kind == "dspark":
        shapes |= {f"markov_head.markov_w{i}.weight": (vocab, 6) for i in (1, 2)}
        shapes |= {"confidence_head.proj.weight": (1, hidden + 6), "confidence_head.proj.bias": (1,)}
    if kind == "domino":
        shapes |= {"prefix_gru.weight_ih_l0": (18, hidden), "prefix_gru.weight_hh_l0": (18, 6)}
        shapes |= {"embed_proj.0.weight": (5, hidden + 6), "embed_proj.2.weight": (vocab, 5)}
    if kind == "dflash2":
        for name in ("attention", "mlp"):
            shapes[f"layers.0.{name}_conv.base_kernel"] = (2, 2, hidden)
            shapes[f"layers.0.{name}_conv.kernel_projection.weight"] = (hidden, hidden)
        shapes |= {f"candidate_selector.{name}_codebook": (vocab, 6) for name in ("predecessor", "successor")}
        shapes["candidate_selector.hidden_projection.weight"] = (6, hidden)
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    config = {"mask_token_id": 3, "target_layer_ids": [1, 4], "block_size": 5}
    config |= {"conv_group_size": 4, "selector_top_k": 3} if kind == "dflash2" else {}
    sizes = SIZES | {"hidden_size": hidden, "head_dim": hidden, "vocab_size": vocab}
    return sizes | config, tensors | plain_layer("layers.0", hidden)
