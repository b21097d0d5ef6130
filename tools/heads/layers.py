"""What the heads in training share: lessons from a target, and the parts of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig


@dataclass
class Lesson:
    """A batch of texts, and what the target thought of them. Nothing here has a gradient."""

    tokens: Tensor  # [B, L]
    states: tuple[Tensor, ...]  # [B, L, h] each: hidden_states as transformers counts them; the last is normalised
    logits: Tensor  # [B, L, V]: row t is about token t + 1
    embedding: Tensor  # [V, h], which is the target's last matrix as well


def divergence(ours: Tensor, wanted: Tensor) -> Tensor:
    """Of the distribution of logits ``ours`` from that of logits ``wanted``, in nats per row."""
    ours, wanted = ours.flatten(0, -2).float().log_softmax(-1), wanted.flatten(0, -2).float().log_softmax(-1)
    return F.kl_div(ours, wanted, reduction="batchmean", log_target=True)


def agreement(ours: Tensor, wanted: Tensor) -> float:
    """How often both have the same most likely token."""
    return (ours.argmax(-1) == wanted.argmax(-1)).float().mean().item()


class Norm(nn.Module):
    """RMSNorm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of x [B, heads, rows, D] at positions [rows] or [B, 1, rows]."""
    half = x.shape[-1] // 2
    angles = positions[..., None].float() * theta ** (-torch.arange(half, device=x.device) / half)
    sine, cosine = angles.sin(), angles.cos()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)


class Projections(nn.Module):
    """The four matrices of attention, with the names they have in files; optionally Qwen3's norms of heads."""

    def __init__(self, config: LlamaConfig, inputs: int, norms: bool = False) -> None:
        super().__init__()
        size, heads, keys = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(inputs, heads * size, bias=False)
        self.k_proj = nn.Linear(inputs, keys * size, bias=False)
        self.v_proj = nn.Linear(inputs, keys * size, bias=False)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)
        self.q_norm = Norm(size, config.rms_norm_eps) if norms else nn.Identity()
        self.k_norm = Norm(size, config.rms_norm_eps) if norms else nn.Identity()
        self.size, self.groups, self.theta = size, heads // keys, config.rope_parameters["rope_theta"]

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotated(self.q_norm(self.heads(self.q_proj(x))), positions, self.theta)

    def keys(self, x: Tensor, positions: Tensor) -> Tensor:
        keys = rotated(self.k_norm(self.heads(self.k_proj(x))), positions, self.theta)
        return keys.repeat_interleave(self.groups, dim=1)

    def values(self, x: Tensor) -> Tensor:
        return self.heads(self.v_proj(x)).repeat_interleave(self.groups, dim=1)

    def out(self, x: Tensor) -> Tensor:
        return self.o_proj(x.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def small(module: nn.Module) -> None:
    """Initialises matrices as Llama's are."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)
