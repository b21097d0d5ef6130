"""Medusa (Cai et al., arXiv 2401.10774): heads that each predict one of the next tokens from the final state alone."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import silu

from ...models.cache.kv_cache import StaticKVCache
from ...models.forward.layout import Layout
from .interface import Head, HeadInput, Logits


class ResBlock(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + silu(self.linear(x))


class Medusa(Head):
    """Head i predicts the token that is i + 2 places after the one whose state it reads. As a chain, each head's
    distribution is the q of its draft, which the drafts before it do not influence.

    Args:
        num_heads: K is at most this.
        num_blocks: residual blocks of each head.
    """

    kind, at_once, independent = "medusa", True, True

    def __init__(self, states: tuple[int, ...], hidden: int, vocab_size: int, num_heads: int, num_blocks: int):
        super().__init__(states, hidden, hidden, vocab_size)
        self.most_drafts = num_heads
        self.medusa_head = nn.ModuleList(
            nn.Sequential(*(ResBlock(hidden) for _ in range(num_blocks)), nn.Linear(hidden, vocab_size, bias=False))
            for _ in range(num_heads)
        )

    def draft(self, rows: HeadInput, ahead: Layout, cache: StaticKVCache, count: int) -> Logits:
        state = rows.features[:, -1]
        for head in self.medusa_head[:count]:
            yield head(state)
