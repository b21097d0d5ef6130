"""Heads written plainly, to compare with: no cache, the whole text anew for each draft, weights by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn.functional import silu

Tensors = Mapping[str, torch.Tensor]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x [H, n, D], at positions 0 to n - 1."""
    half = x.shape[2] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half).double() * 2 / x.shape[2])
    a, b, angles = x[..., :half], x[..., half:], angles.float()
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def attention(
    t: Tensors, prefix: str, config: Mapping, u: torch.Tensor, hidden: torch.Tensor | None = None, asking: int = 0
) -> torch.Tensor:
    """u [n, inputs] -> the last ``asking`` rows (0: all) of [n, hidden]. ``hidden`` [n, n] says what rows do not see;
    None: those after them."""
    size, theta = config["head_dim"], config.get("rope_theta", 10000.0)

    def project(name: str) -> torch.Tensor:
        out = u @ t[f"{prefix}.{name}_proj.weight"].T + t.get(f"{prefix}.{name}_proj.bias", 0)
        return out.view(len(u), -1, size).transpose(0, 1)

    q, k, v = (project(name) for name in "qkv")
    if f"{prefix}.q_norm.weight" in t:
        q, k = (rms(x, t[f"{prefix}.{n}_norm.weight"], config["rms_norm_eps"]) for x, n in ((q, "q"), (k, "k")))
    groups = len(q) // len(k)
    q, k, v = rotate(q, theta), rotate(k, theta).repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    hidden = torch.ones(len(u), len(u)).triu(1).bool() if hidden is None else hidden
    scores = (q @ k.mT / size**0.5).masked_fill(hidden, -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)[-asking:]
    return out @ t[f"{prefix}.o_proj.weight"].T + t.get(f"{prefix}.o_proj.bias", 0)


def mlp(t: Tensors, prefix: str, x: torch.Tensor) -> torch.Tensor:
    return (silu(x @ t[f"{prefix}.gate_proj.weight"].T) * (x @ t[f"{prefix}.up_proj.weight"].T)) @ t[
        f"{prefix}.down_proj.weight"
    ].T


def eagle3(
    t: Tensors, config: Mapping, states: list[torch.Tensor], text: list[int], drafts: list[int], *,
    first: str = "layers.0", embedding: torch.Tensor, head: torch.Tensor, norm_before_residual: bool = False,
    recycle_normed: bool = False, later_norm: str = "input_layernorm", mask_token: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Logits [len(drafts) + 1, columns] of the drafts after ``text`` [L]. ``states`` are the target's, [L, h] each, in
    the order in which the head reads them. With ``mask_token``, those of P-EAGLE."""
    eps = config["rms_norm_eps"]
    if mask_token is not None:  # as if they were states of tokens that are not known
        masks = t["mask_hidden"].view(1, -1).chunk(len(states), 1)
        states = [torch.cat((x[: len(text) - 1], *[m] * len(drafts))) for x, m in zip(states, masks, strict=True)]
        text = [*text, *[mask_token] * len(drafts)]
    if "input_norm.weight" in t:
        states = list(rms(torch.cat(states, 1), t["input_norm.weight"], eps).chunk(len(states), 1))
    if "fc_norm.0.weight" in t:
        states = [rms(x, t[f"fc_norm.{i}.weight"], eps) for i, x in enumerate(states)]
    if "aux_norm_low.weight" in t:
        states = [rms(x, t[f"aux_norm_{n}.weight"], eps) for n, x in zip(("low", "mid", "high"), states, strict=True)]
    side = torch.cat(states, 1)
    features = (side @ t["fc.weight"].T if "fc.weight" in t else side)[: len(text) - 1]
    known, rows = list(text), []
    later = sorted({n.split(".")[1] for n in t if n.startswith("layers.")} - {"0"})
    for token in [*drafts, None] if mask_token is None else [None]:
        g = rms(features, t[f"{first}.hidden_norm.weight"], eps)
        e = rms(embedding[torch.tensor(known[1:])], t[f"{first}.input_layernorm.weight"], eps)
        x = g if norm_before_residual else features
        x = x + attention(t, f"{first}.self_attn", config, torch.cat((e, g), 1))
        x = x + mlp(t, f"{first}.mlp", rms(x, t[f"{first}.post_attention_layernorm.weight"], eps))
        for i in later:
            normed = rms(x, t[f"layers.{i}.{later_norm}.weight"], eps)
            x = x + attention(t, f"layers.{i}.self_attn", config, normed)
            x = x + mlp(t, f"layers.{i}.mlp", rms(x, t[f"layers.{i}.post_attention_layernorm.weight"], eps))
        out = rms(x, t["norm.weight"], eps)
        rows.append(out[-1] @ head.T)
        if mask_token is not None:
            return out[-len(drafts) - 1 :] @ head.T
        features = torch.cat((features, (out if recycle_normed else x)[-1:]))
        known.append(token)
    return torch.stack(rows)


def eagle(
    t: Tensors, config: Mapping, final: torch.Tensor, text: list[int], drafts: list[int], *,
    embedding: torch.Tensor, head: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The same for EAGLE-1; ``final`` [L, h] is the target's last state, after the norm."""
    features, known, rows = final[: len(text) - 1], list(text), []
    for token in [*drafts, None]:
        x = torch.cat((embedding[torch.tensor(known[1:])], features), 1) @ t["fc.weight"].T + t.get("fc.bias", 0)
        x = x + attention(t, "layers.0.self_attn", config, x)
        normed = rms(x, t["layers.0.post_attention_layernorm.weight"], config["rms_norm_eps"])
        x = x + mlp(t, "layers.0.mlp", normed)
        rows.append(x[-1] @ head.T)
        features = torch.cat((features, x[-1:]))
        known.append(token)
    return torch.stack(rows)


def medusa(t: Tensors, heads: int, blocks: int, final: torch.Tensor, text: list[int], drafts: list[int]):
    """The same for Medusa, of up to ``heads`` drafts."""
    rows = []
    for i in range(min(heads, len(drafts) + 1)):
        x = final[len(text) - 2]
        for j in range(blocks):
            x = x + silu(t[f"{i}.{j}.linear.weight"] @ x + t[f"{i}.{j}.linear.bias"])
        rows.append(t[f"{i}.{blocks}.weight"] @ x)
    return torch.stack(rows)


def dflash(
    t: Tensors, config: Mapping, states: list[torch.Tensor], text: list[int], drafts: list[int], *,
    embedding: torch.Tensor, head: torch.Tensor, block: int, mask_token: int, causal: bool, from_anchor: bool,
    hides: Callable[[int, int, int, int], bool] = lambda layer, known, query, key: False,
) -> torch.Tensor:  # fmt: skip
    """The same for DFlash. ``hides(i, known, query, key)`` says what a layer's window hides, by positions; ``known`` is
    that of the block's first token."""
    eps, known = config["rms_norm_eps"], len(text) - 1
    context = rms(torch.cat(states, 1)[:known] @ t["fc.weight"].T, t["hidden_norm.weight"], eps)
    x = embedding[torch.tensor([text[-1], *[mask_token] * (block - 1)])]
    hidden = torch.zeros(known + block, known + block).bool()
    if causal:
        hidden = torch.ones_like(hidden).triu(1)
    for i in sorted({n.split(".")[1] for n in t if n.startswith("layers.")}):
        a = rms(x, t[f"layers.{i}.input_layernorm.weight"], eps)
        place = range(known + block)
        window = torch.tensor([[q >= known and hides(int(i), known, q, k) for k in place] for q in place])
        x = x + attention(t, f"layers.{i}.self_attn", config, torch.cat((context, a)), hidden | window, block)
        x = x + mlp(t, f"layers.{i}.mlp", rms(x, t[f"layers.{i}.post_attention_layernorm.weight"], eps))
    out = rms(x, t["norm.weight"], eps) @ head.T
    out = (out if from_anchor else out[1:])[: len(drafts) + 1]
    if "markov_head.markov_w1.weight" in t:
        before = torch.tensor([text[-1], *drafts])
        out = out + t["markov_head.markov_w1.weight"][before] @ t["markov_head.markov_w2.weight"].T
    return out
