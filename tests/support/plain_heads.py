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
    hides: Callable[[int, int, int, int], bool] = lambda layer, known, query, key: False, most: int = 0, pure: int = 0,
) -> torch.Tensor:  # fmt: skip
    """The same for DFlash, and what walks through its block. ``hides(i, known, query, key)`` says what a layer's window
    hides, by positions; ``known`` is that of the block's first token. DFlash2 selects from ``most`` tokens, and Domino
    leaves the first ``pure`` drafts as they are."""
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
        u = convolved(t, f"layers.{i}.attention_conv", 0, a, a)
        y = attention(t, f"layers.{i}.self_attn", config, torch.cat((context, u)), hidden | window, block)
        x = x + convolved(t, f"layers.{i}.attention_conv", 1, y, a)
        a = rms(x, t[f"layers.{i}.post_attention_layernorm.weight"], eps)
        y = mlp(t, f"layers.{i}.mlp", convolved(t, f"layers.{i}.mlp_conv", 0, a, a))
        x = x + convolved(t, f"layers.{i}.mlp_conv", 1, y, a)
    x = rms(x, t["norm.weight"], eps)
    x = (x if from_anchor else x[1:])[: len(drafts) + 1]
    out, before = x @ head.T, torch.tensor([text[-1], *drafts])[: len(x)]
    if "markov_head.markov_w1.weight" in t:
        return out + t["markov_head.markov_w1.weight"][before] @ t["markov_head.markov_w2.weight"].T
    if "prefix_gru.weight_ih_l0" in t:
        states = gru(t, embedding[before])
        more = silu(torch.cat((x, states), 1) @ t["embed_proj.0.weight"].T) @ t["embed_proj.2.weight"].T
        more[:pure] = 0
        return out + more
    if most:
        pair = t["candidate_selector.predecessor_codebook"][before]
        pair = pair * (x @ t["candidate_selector.hidden_projection.weight"].T)
        scores = out + pair @ t["candidate_selector.successor_codebook"].T
        worst = out.sort(1, descending=True).values[:, most - 1 : most]
        return scores.masked_fill(out < worst, -torch.inf)
    return out


def convolved(t: Tensors, prefix: str, side: int, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """[block, hidden]: x convolved before a layer (0) or after it (1), of which ``a`` asks for the kernels; x itself
    where there are none."""
    if f"{prefix}.base_kernel" not in t:
        return x
    base, out = t[f"{prefix}.base_kernel"][side], torch.zeros_like(x)
    wanted = (a @ t[f"{prefix}.kernel_projection.weight"].T).view(len(a), 2, len(base), -1)[:, side]
    size = x.shape[1] // wanted.shape[2]
    for place in range(len(x)):
        for back in range(min(len(base), place + 1)):
            for c in range(x.shape[1]):
                kernel = base[back, c] + wanted[place, back, c // size]
                out[place, c] += x[place - back, c] * kernel
    return out


def gru(t: Tensors, inputs: torch.Tensor) -> torch.Tensor:
    """The states [n, size] of a gated recurrent unit after each of ``inputs``."""
    ours, theirs = t["prefix_gru.weight_ih_l0"].chunk(3), t["prefix_gru.weight_hh_l0"].chunk(3)
    state, states = torch.zeros(theirs[0].shape[1]), []
    for x in inputs:
        reset, keep = ((a @ x + b @ state).sigmoid() for a, b in zip(ours[:2], theirs[:2], strict=True))
        state = (1 - keep) * (ours[2] @ x + reset * (theirs[2] @ state)).tanh() + keep * state
        states.append(state)
    return torch.stack(states)
