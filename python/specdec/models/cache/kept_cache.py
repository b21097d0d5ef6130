"""A cache that is kept for the next text: programs that were made over its memory (programs.py) then need not be made
again, which takes as long as some steps of a small model."""

from __future__ import annotations

from collections.abc import Sequence

from .kv_cache import StaticKVCache
from .kv_layer import LayerSlot

LARGEST = 1 << 28  # bytes; the texts that fill a larger one take long enough
_MOST_SLOTS = 8  # times as many as are needed
LEAST = 256  # tokens for which a cache that may be kept has room
ROOMY = 1 << 26  # bytes up to which it has room for more than its first texts need


def with_room(tokens: int, token_bytes: int) -> int:
    """Returns for how many tokens of a row there should be room where ``tokens`` are needed: for more, if that is
    little memory, so that the next text, which may be longer, finds the cache kept."""
    roomy = max(LEAST, 1 << (tokens - 1).bit_length())
    return roomy if roomy * token_bytes <= ROOMY else tokens


class KeptCache:
    """At most one cache of a model. It is for models whose attention reads only the slots that were filled: the texts
    are then the same over any cache with slots enough, whatever it held before. None of their layers has a state."""

    def __init__(self) -> None:
        self._kept: list[StaticKVCache] = []

    def give(self, cache: StaticKVCache) -> None:
        """Keeps a cache that nobody uses any more, unless it is large, or has more than keys and values."""
        size = sum(states.nbytes for states in cache.storage())
        if size <= LARGEST and cache.features is None:
            self._kept = [cache]

    def take(self, batch_size: int, capacity: int, slots: Sequence[LayerSlot]) -> StaticKVCache | None:
        """Returns the cache that is kept, with lengths of 0 and at least so many slots; None: there is none like that,
        and none is kept any longer."""
        try:
            cache = self._kept.pop()  # in one go, as texts may be decoded on several threads
        except IndexError:
            return None
        fits = cache.rows == batch_size and capacity <= cache.capacity <= _MOST_SLOTS * capacity
        if not fits or cache.slots() != tuple(slots):
            return None
        cache.restart()
        return cache
