"""Heads whose drafts take one forward each, over keys and values of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...models.cache.kv_cache import StaticKVCache
from ...models.forward.layout import Layout
from ..tree_growth import Growing, Level
from .interface import Head, HeadInput, Logits


class DraftsInTurn(Head):
    """A head that is fed pairs of a feature and the next token. For a drafted token, whose feature is not known, its
    own output stands in."""

    grows_trees = True

    def run(self, rows: HeadInput, cache: StaticKVCache) -> torch.Tensor:
        """Feeds pairs, and returns what ``logits`` takes of each, [n, q, hidden]."""
        raise NotImplementedError

    def recycled(self, out: torch.Tensor) -> torch.Tensor:
        """Returns what stands in for the feature of a drafted token."""
        return out

    def read(self, rows: HeadInput, cache: StaticKVCache) -> None:
        self.run(rows, cache)

    def draft(self, rows: HeadInput, ahead: Layout, cache: StaticKVCache, count: int) -> Logits:
        out = self.run(rows, cache)[:, -1:]
        places = ahead.split([1] * (count - 1))
        for i in range(count):
            tokens = yield self.logits(out)[:, 0]
            if i + 1 < count:
                out = self.run(HeadInput(self.recycled(out), tokens, places[i]), cache)

    def grow(self, rows: HeadInput, growing: Growing, layout: Callable[[Level], Layout], cache: StaticKVCache) -> int:
        out, forwards = self.run(rows, cache)[:, -1:], 1
        growing.take(self.logits(out))
        while (level := growing.next()) is not None:
            parents = level.parents[..., None].expand(len(out), -1, out.shape[2])
            out = self.run(HeadInput(self.recycled(out).gather(1, parents), level.tokens, layout(level)), cache)
            growing.take(self.logits(out))
            forwards += 1
        return forwards
