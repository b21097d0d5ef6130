"""MTP layers written plainly from the tensors of their published files, and the drafts of any MTP layers: no cache, the
whole text anew for each draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn.functional import silu

from .plain_heads import Tensors, mlp, rms

# What layer k makes of features [n, h] and the tokens after them: its output [n, h], after its norm.
Step = Callable[[int, torch.Tensor, list[int]], torch.Tensor]


def drafted(step: Step, count: int, head: torch.Tensor, final, text: list[int], drafts: list[int]) -> torch.Tensor:
    """Logits [len(drafts) + 1, V] of the drafts of ``count`` layers after ``text``; ``final`` [L, h] is the target's
    last state, after the norm."""
    rows, features, known = [], final[: len(text) - 1], [*text, *drafts]
    for i in range(len(drafts) + 1):
        if count > 1:  # layer i over all known rows
            features = step(i, features, known[1 + i : len(text) + i])
            rows.append(features[-1] @ head.T)
        else:  # the layer once more over one row more
            states = step(0, features, known[1 : len(text) + i])
            rows.append(states[-1] @ head.T)
            features = torch.cat((features, states[-1:]))
    return torch.stack(rows)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q, k [H, n, D], v [H, n, E] -> [n, H * E]. A token sees itself and those before it."""
    later = torch.ones(q.shape[1], q.shape[1]).triu(1).bool()
    scores = (q @ k.mT / q.shape[2] ** 0.5).masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def _experts(t: Tensors, prefix: str, config: Mapping, x: torch.Tensor, expert: Callable) -> torch.Tensor:
    """x [n, h] -> what DeepSeek's router mixes of the experts' outputs. The bias decides which experts are asked, first
    the group of the two best, and not how much they count."""
    rows = []
    for row in x:
        scores = (row @ t[f"{prefix}.gate.weight"].T).sigmoid()
        groups = (scores + t[f"{prefix}.gate.e_score_correction_bias"]).view(config["n_group"], -1)
        best = groups.topk(2, -1).values.sum(-1).topk(config["topk_group"]).indices
        open_groups = torch.full_like(groups, -torch.inf)
        open_groups[best] = groups[best]
        asked = open_groups.flatten().topk(config["num_experts_per_tok"]).indices.tolist()
        whole = sum(scores[e] for e in asked)
        parts = [scores[e] / whole * expert(f"{prefix}.experts.{e}", row) for e in asked]
        rows.append(config["routed_scaling_factor"] * sum(parts))
    return torch.stack(rows)


# ---- DeepSeek-V3, GLM-4.7-Flash --------------------------------------------------------------------------------


def _turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x [H, n, D], of which two numbers side by side are a pair, at positions 0 to n - 1."""
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(0, x.shape[2], 2).double() / x.shape[2])
    turned = torch.view_as_complex(x.double().unflatten(2, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(2).float()


def latent_attention(t: Tensors, prefix: str, config: Mapping, u: torch.Tensor) -> torch.Tensor:
    """Multi-head latent attention (DeepSeek-AI, arXiv 2405.04434, section 2.1)."""
    heads, plain, turning = (config[n] for n in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    theta = config["rope_parameters"]["rope_theta"]

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ t[f"{prefix}.{name}.weight"].T

    # transformers' norms inside of attention have 1e-6, whatever the configuration says.
    queries = rms(project(u, "q_a_proj"), t[f"{prefix}.q_a_layernorm.weight"], 1e-6)
    queries = project(queries, "q_b_proj").view(len(u), heads, -1).transpose(0, 1)
    latent, turned_key = project(u, "kv_a_proj_with_mqa").split((config["kv_lora_rank"], turning), -1)
    latent = project(rms(latent, t[f"{prefix}.kv_a_layernorm.weight"], 1e-6), "kv_b_proj")
    keys, values = latent.view(len(u), heads, -1).transpose(0, 1).split((plain, config["v_head_dim"]), -1)
    q = torch.cat((queries[..., :plain], _turned(queries[..., plain:], theta)), -1)
    k = torch.cat((keys, _turned(turned_key[None], theta).expand(heads, -1, -1)), -1)
    return project(_attend(q, k, values), "o_proj")


def latent_layer(t: Tensors, root: str, config: Mapping, features: torch.Tensor, embedded: torch.Tensor):
    """The layer ``root``, such as "model.layers.47", on features and embeddings [n, h] -> [n, h], after its norm."""
    eps = config["rms_norm_eps"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return rms(x, t[f"{root}.{name}.weight"], eps)

    def expert(prefix: str, row: torch.Tensor) -> torch.Tensor:
        gate, up, down = (t[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return down @ (silu(gate @ row) * (up @ row))

    x = torch.cat((norm(embedded, "enorm"), norm(features, "hnorm")), 1) @ t[f"{root}.eh_proj.weight"].T
    x = x + latent_attention(t, f"{root}.self_attn", config, norm(x, "input_layernorm"))
    u = norm(x, "post_attention_layernorm")
    x = x + _experts(t, f"{root}.mlp", config, u, expert) + mlp(t, f"{root}.mlp.shared_experts", u)
    return norm(x, "shared_head.norm")


# ---- Nemotron-H ------------------------------------------------------------------------------------------------


def _squared(t: Tensors, prefix: str, x: torch.Tensor) -> torch.Tensor:
    """An MLP whose activation is the square of ReLU."""
    return (x @ t[f"{prefix}.up_proj.weight"].T).relu() ** 2 @ t[f"{prefix}.down_proj.weight"].T


def nemotron_block(t: Tensors, prefix: str, kind: str, config: Mapping, u: torch.Tensor) -> torch.Tensor:
    """A mixer on normed states [n, h]: "*" attention without positions, "E" experts, "-" an MLP."""
    if kind == "*":
        q, k, v = (u @ t[f"{prefix}.{name}_proj.weight"].T for name in "qkv")
        q, k, v = (x.view(len(u), -1, config["head_dim"]).transpose(0, 1) for x in (q, k, v))
        groups = len(q) // len(k)
        out = _attend(q, k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0))
        return out @ t[f"{prefix}.o_proj.weight"].T
    if kind == "-":
        return _squared(t, prefix, u)
    into, back = (t.get(f"{prefix}.fc{i}_latent_proj.weight") for i in (1, 2))

    def expert(name: str, row: torch.Tensor) -> torch.Tensor:
        out = _squared(t, name, row if into is None else into @ row)
        return out if back is None else back @ out

    return _experts(t, prefix, config, u, expert) + _squared(t, f"{prefix}.shared_experts", u)


def nemotron_layer(t: Tensors, k: int, pattern: str, config: Mapping, features: torch.Tensor, embedded: torch.Tensor):
    """Layer ``k``, of the blocks ``pattern``, on features and embeddings [n, h] -> [n, h], after its norm."""
    eps, first, last = config["layer_norm_epsilon"], k * len(pattern), (k + 1) * len(pattern) - 1

    def norm(x: torch.Tensor, block: int, name: str) -> torch.Tensor:
        return rms(x, t[f"mtp.layers.{block}.{name}.weight"], eps)

    both = torch.cat((norm(embedded, first, "enorm"), norm(features, first, "hnorm")), 1)
    x = both @ t[f"mtp.layers.{first}.eh_proj.weight"].T
    for block, kind in enumerate(pattern, first):
        x = x + nemotron_block(t, f"mtp.layers.{block}.mixer", kind, config, norm(x, block, "norm"))
    return norm(x, last, "final_layernorm")
