"""Medusa (arXiv 2401.10774, section 2.1): each head guesses one later token from the last hidden state alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from .layers import Lesson, agreement, divergence

HEADS = 3
DECAY = 0.8  # the weight of a head's loss, of the one before


class Block(nn.Module):
    """x + SiLU(A x + b), which is x at first."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(nn.Module):
    file = "model.safetensors"

    def __init__(self, target: LlamaConfig, embedding: Tensor, kept: Tensor) -> None:
        super().__init__()
        self.heads = nn.ModuleList()
        for _ in range(HEADS):
            last = nn.Linear(*reversed(embedding.shape), bias=False)
            with torch.no_grad():
                last.weight.copy_(embedding)
            self.heads.append(nn.Sequential(Block(target.hidden_size), last))

    def learn(self, lesson: Lesson, chance: torch.Generator) -> tuple[Tensor, list[float]]:
        """The loss, and how often each head's most likely token is the target's. Head i guesses token t + 2 + i."""
        total, hits = 0.0, []
        for i, head in enumerate(self.heads):
            ours, wanted = head(lesson.states[-1][:, : -1 - i]), lesson.logits[:, 1 + i :]
            total = total + DECAY**i * divergence(ours, wanted)
            hits.append(agreement(ours, wanted))
        return total, hits

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.heads.state_dict())

    def config(self) -> dict[str, object]:
        return {"medusa_num_heads": HEADS, "medusa_num_layers": 1, "base_model_name_or_path": "specdec-embedded-target"}
