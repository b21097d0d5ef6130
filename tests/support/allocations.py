"""Measures what caches allocate, and makes models run out of memory."""

from __future__ import annotations

import torch


def allocated(cache) -> list[tuple[int, int]]:
    """Address and bytes of every storage."""
    stored = [t for layer in cache.layers if layer.is_initialized for t in (layer.keys, layer.values)]
    stored += [t for layer in cache.recurrent for t in (*(layer.state or ()), layer.inputs)]
    storages = [t.untyped_storage() for t in stored]
    return [(storage.data_ptr(), storage.nbytes()) for storage in storages]


class LittleMemory:
    """Attention that raises an out-of-memory error beyond a number of scores, tokens x slots: that of models which are
    given a mask (``masked``)."""

    def __init__(self, room: int):
        self.room, self.seen = room, []

    def before(self, module, args, kwargs):
        tokens, slots = kwargs["attention_mask"].shape[-2:]
        self.seen.append((tokens, slots))
        if tokens * slots > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def masked(monkeypatch) -> None:
    """Lets all models compute attention themselves, over a mask of the slots."""
    monkeypatch.setattr("specdec.models.forward.cached_model.choose", lambda model, requested="auto": "model")


def unrecorded(monkeypatch) -> None:
    """Every forward runs its modules, for tests that look into forwards."""
    monkeypatch.setattr("specdec.models.forward.forwards.is_recordable", lambda model: False)
