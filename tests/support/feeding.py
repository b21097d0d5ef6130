"""Feeds ragged tokens to a cached model, and computes the full forwards to compare with."""

from __future__ import annotations

import torch
from specdec import StaticKVCache
from specdec.models.cache.kv_cache import visible_slots
from specdec.models.forward.cached_model import CachedModel


def full_logits(model, sequence: list[int]) -> torch.Tensor:
    return model(torch.tensor([sequence]), use_cache=False).logits[0]


def feed(cached: CachedModel, cache: StaticKVCache, tokens: list[list[int]]) -> torch.Tensor:
    """Feeds a ragged continuation at each sequence's own length; padding goes to the slot for discarded tokens. Returns
    [B, q, V] logits."""
    longest = max(map(len, tokens))
    valid = torch.tensor([[i < len(t) for i in range(longest)] for t in tokens])
    places = cache.lengths[:, None] + torch.arange(longest)
    slots = torch.where(valid, places, cache.trash)
    visible = visible_slots(int((places * valid).max()) + 1, cache.capacity)
    fed = torch.tensor([[*t, *[0] * (longest - len(t))] for t in tokens])
    logits = cached(fed, cache, cached.layout(places * valid, slots, visible))
    cache.lengths = cache.lengths + valid.sum(1)
    return logits


def assert_rows(model, logits: torch.Tensor, known: list[list[int]], new: list[list[int]], atol: float = 2e-5) -> None:
    for b, (old, added) in enumerate(zip(known, new, strict=True)):
        expected = full_logits(model, old + added)[len(old) :]
        torch.testing.assert_close(logits[b, : len(added)], expected, atol=atol, rtol=1e-4)
