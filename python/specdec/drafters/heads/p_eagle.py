"""P-EAGLE: an EAGLE-3 head that drafts all tokens of a step in one forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...models.cache.kv_cache import StaticKVCache
from ...models.forward.layout import Layout
from .eagle3 import Eagle3
from .interface import HeadInput, Logits


class PEagle(Eagle3):
    """The pairs of tokens that are not drafted yet have a mask token and a trained feature. So the drafts do not
    influence each other, and each one's q is known.

    Args:
        mask_token: the id that stands for tokens that are not known.
        others: those of :class:`Eagle3`.
    """

    kind, at_once, independent = "peagle", True, True

    def __init__(self, mask_token: int, *others: Any):
        super().__init__(*others)
        self.mask_token = mask_token
        inputs = len(self.states) * self.hidden
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, inputs))

    def draft(self, rows: HeadInput, ahead: Layout, cache: StaticKVCache, count: int) -> Logits:
        size, known = len(rows.tokens), rows.layout
        masked = self.combine(self.mask_hidden).expand(size, count - 1, -1)
        tokens = rows.tokens.new_full((size, count - 1), self.mask_token)
        positions = torch.cat((known.positions, ahead.positions), 1)
        layout = self.layout(positions, torch.cat((known.slots, ahead.slots), 1), known.visible)
        whole = HeadInput(torch.cat((rows.features, masked), 1), torch.cat((rows.tokens, tokens), 1), layout)
        out = self.run(whole, cache)[:, -count:]
        for i in range(count):
            yield self.logits(out[:, i])
