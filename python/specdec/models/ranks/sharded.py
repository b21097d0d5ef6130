"""Rank 0's view of a model whose weights are in shards over several processes: the same model over the same cache, of
which all that touches the weights or the cache is done by the other ranks as well (``follower``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed
from transformers import PreTrainedModel

from ...checks import refuse
from ..cache.kv_cache import StaticKVCache
from ..cache.kv_layer import LayerSlot
from ..cache.recurrent_layer import RecurrentLayer
from ..exchanged.shards import with_whole_ends
from ..forward.cached_model import CachedModel
from ..forward.forwards import Forwards
from ..forward.layout import Layout
from ..machine.free_memory import free_memory
from .channel import Leader

T = TypeVar("T")
UNKNOWN = 2**62  # bytes of free memory, where a rank cannot tell


class ShardedModel(CachedModel):
    """A ``CachedModel`` of rank 0, whose forwards all ranks enter (:class:`LedForwards`), as they do whatever else
    touches the weights or the caches.

    Args:
        model, name, cache_dtype: as in ``CachedModel``; rank 0's part of a model that ``load_model(tp=...)`` loaded.
        leader: of the ranks that have the other parts.
        number: under which they know the model.

    Raises:
        ValueError: as ``CachedModel``, and for models with recurrent layers.
    """

    is_sharded = True

    def __init__(self, model: PreTrainedModel, name: str, cache_dtype: torch.dtype | None, leader: Leader, number: int):
        forwards = functools.partial(LedForwards, leader=leader)
        super().__init__(model, name, cache_dtype=cache_dtype, forwards=forwards)
        self._leader, self._loaded = leader, number
        if self.recurrent:
            refuse("tp", f"{leader.size} for model type {self.config.model_type!r}", "None for recurrent layers")
        self._number = leader.share(self)
        with leader.all_do("model", number=self._number, loaded=number, cache_dtype=name_of(cache_dtype)):
            pass

    def free_memory(self) -> int | None:
        """Returns what is free on the device that has least. On a CPU all ranks have their caches in one memory."""
        with self._leader.all_do("memory"):
            least = least_free(self.device)
        if least is None or self.device.type != "cpu":
            return least
        return least // self._leader.size

    def with_whole_ends(self) -> PreTrainedModel:
        with self._leader.all_do("whole ends", loaded=self._loaded), torch.inference_mode(False), torch.no_grad():
            return with_whole_ends(self.model)

    def _cache(self, batch_size: int, capacity: int, dtype: torch.dtype | None, window: int) -> StaticKVCache:
        own = self.config, batch_size, capacity, self.device
        cache = SharedCache(self._leader, *own, dtype=dtype, as_stored=self.attention.is_native)
        size = {"rows": batch_size, "capacity": capacity, "dtype": name_of(dtype)}
        with self._leader.all_do("cache", number=cache.number, model=self._number, **size):
            pass
        return cache


class LedForwards(Forwards):
    """Forwards of rank 0, which all ranks enter. They get the tokens and where these are, and make masks themselves.
    Logits are gathered by transformers, so that rank 0 has them whole. A rank that fails ends all forwards for good:
    every later one raises :class:`~specdec.models.ranks.channel.RanksParted`. Nothing is recorded.

    Args:
        given: what ``Forwards`` is given.
        leader: of the ranks that have the other parts.
    """

    def __init__(self, *given: Any, leader: Leader):
        super().__init__(*given)
        self._leader = leader

    def run(
        self,
        module: Callable[..., T],
        tokens: torch.Tensor,
        cache: StaticKVCache,
        layout: Layout,
        first_row: int = 0,
        keep: bool = False,
    ) -> T:
        assert isinstance(cache, SharedCache)
        if torch.is_autocast_enabled(self.model.device.type):
            refuse("tp", f"{self._leader.size} under autocast", "a dtype of load_model, which the other ranks know")
        tree = layout.tree
        assert tree is None or tree.parents is not None, "a part of a tree was fed"
        parents = [] if tree is None or tree.parents is None else [tree.parents]
        what = {
            "module": "steps" if module is self.steps else "prompts" if module is self.prompts else "base",
            "masked": layout.mask is not None,
            "visible": layout.visible,
            "first_row": first_row,
            "keep": keep,
        }
        given = tokens, layout.positions, layout.slots, *parents
        with self._leader.all_do("forward", *given, cache=cache.number, **what), torch.inference_mode():
            return super().run(module, tokens, cache, layout, first_row, keep)


class SharedCache(StaticKVCache):
    """Rank 0's cache, for its own heads. The other ranks have one of the same shape for theirs, with which they do the
    same.

    Attributes:
        number: under which they know it.
    """

    def __init__(self, leader: Leader, *own, **settings):
        super().__init__(*own, **settings)
        self._leader, self.number = leader, leader.share(self)

    def allocate(self, slots: Sequence[LayerSlot], states: Sequence[RecurrentLayer] = ()) -> None:
        # Ranks have equal numbers of heads, as loading checked.
        sizes = [None if pair is None else [[*slot[:2], name_of(slot.dtype)] for slot in pair] for pair in slots]
        with self._leader.all_do("allocate", cache=self.number, slots=sizes):
            super().allocate(slots, states)

    def begin(self, row: int, kept: int = 0) -> None:
        with self._leader.all_do("begin", cache=self.number, row=row, kept=kept):
            super().begin(row, kept)

    def copy_rows(self, sources: Sequence[int], rows: Sequence[int], count: int) -> None:
        copied = {"sources": list(sources), "rows": list(rows), "count": count}
        with self._leader.all_do("copy rows", cache=self.number, **copied):
            super().copy_rows(sources, rows, count)

    def compact(self, path: torch.Tensor) -> None:
        with self._leader.all_do("compact", self.lengths, path, cache=self.number):
            super().compact(path)


def least_free(device: torch.device) -> int | None:
    """Returns what is free on the rank's device that has least; None: a rank cannot tell. All ranks call it."""
    own = free_memory(device)
    least = torch.tensor(UNKNOWN if own is None else own, device=device)
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    return None if least.item() == UNKNOWN else int(least.item())


def name_of(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
