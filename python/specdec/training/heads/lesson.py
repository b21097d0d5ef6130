"""What a head learns from, and how far it is from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..losses import Wanted, loss_of


@dataclass(frozen=True)
class Lesson:
    """A batch of texts, and what the target thought of them. Nothing here has a gradient.

    Attributes:
        tokens: [B, L] int64.
        states: [B, L, n * h] float32: the hidden states that the head reads, those of one token side by side.
        logits: [B, L, V] float32: row t is about token t + 1.
    """

    tokens: torch.Tensor
    states: torch.Tensor
    logits: torch.Tensor


def loss_between(weights: Mapping[str, float], ours: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Returns the mean over all rows of ``losses.loss_of``, whose names ``weights`` has, without ``data``.

    Args:
        ours, wanted: logits [..., n], of the head and of the target for the same tokens.
    """
    nothing = torch.empty(0, dtype=torch.int64, device=ours.device)
    return loss_of(weights, ours.flatten(0, -2), Wanted.of(wanted), nothing)


def agreement(ours: torch.Tensor, wanted: torch.Tensor, d2t: torch.Tensor | None = None) -> float:
    """Returns how often both have the same most likely token.

    Args:
        ours: logits [..., columns].
        wanted: logits [..., V].
        d2t: [columns] int64, the tokens of our columns; None: they are the same.
    """
    best = ours.argmax(-1) if d2t is None else d2t[ours.argmax(-1)]
    return (best == wanted.argmax(-1)).float().mean().item()
