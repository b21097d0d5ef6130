"""One layer of a static cache that stores keys and values."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from specdec_layers import Feed, store_and_attend
from transformers.cache_utils import CacheLayerMixin

from ..exchanged.deferred import NewKeys


class Slot(NamedTuple):
    """The keys, or the values, that one token of one sequence stores in a layer."""

    heads: int
    size: int  # of a head
    dtype: torch.dtype

    @classmethod
    def of(cls, stored: torch.Tensor) -> Slot:
        """Returns the slot of stored keys or values [B, H_kv, S, D]."""
        return cls(stored.shape[1], stored.shape[3], stored.dtype)

    @property
    def bytes(self) -> int:
        return self.heads * self.size * self.dtype.itemsize


LayerSlot = tuple[Slot, Slot] | None  # keys and values; None: the layer stores nothing, as it reads another layer's


class Writer:
    """The slots to which the next keys and values go, and the slots that attention sees. Set once a forward and shared
    by all layers.

    Attributes:
        window: how many tokens recurrent layers can take back.
        feed: what is fed next, for recurrent layers; None: there are none.
        defers: attention itself stores the next keys and values (``deferred``).

    The layers refer to this object and not to the cache, because a reference cycle would keep the memory until a
    garbage collection.
    """

    def __init__(self, batch_size: int, capacity: int, device: torch.device, dtype: torch.dtype | None, window: int):
        self.batch_size, self.capacity, self.device, self.dtype = batch_size, capacity, device, dtype
        self.window, self.feed = window, cast(Feed | None, None)
        self.visible, self.rows = 0, slice(0, batch_size)
        self.append_new = self.as_stored = self.defers = False
        self.slots = torch.zeros(batch_size, 0, dtype=torch.int64, device=device)
        self._index: dict[int, torch.Tensor] = {}  # by number of heads: this forward's flat rows
        self._first_row: dict[int, torch.Tensor] = {}  # by number of heads: constant
        self._counter: torch.Tensor | None = None

    def set(self, slots: torch.Tensor, visible: int, first_row: int, defers: bool = False) -> None:
        self.slots, self.visible, self.defers = slots, visible, defers
        size = slots.shape[0]
        # For all rows the slice has no bounds, because a compiled forward would make bounds constants of its graph.
        self.rows = slice(None) if size == self.batch_size else slice(first_row, first_row + size)
        self._index.clear()

    def index(self, num_heads: int) -> torch.Tensor:
        """Returns the ``flat`` rows of the slots that were set, which are found once a forward."""
        index = self._index.get(num_heads)
        if index is None:
            index = self._index[num_heads] = self.flat(self.slots, num_heads, self.rows)
        return index

    def counter(self, count: int) -> torch.Tensor:
        """Returns at least so many int32 zeros, which those who use them make zeros again. They are made once, but in
        a graph that is captured, whose replays alone would make them zeros."""
        if self._counter is not None and len(self._counter) >= count:
            return self._counter
        made = torch.zeros(count, dtype=torch.int32, device=self.device)
        if not (made.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._counter = made
        return made

    def flat(self, slots: torch.Tensor, num_heads: int, rows: slice = slice(None)) -> torch.Tensor:
        """Returns [n * num_heads * q] int64, in the order of keys [n, num_heads, q, D]: where ``slots`` [n, q] of the n
        ``rows`` are in the storage viewed as [B * num_heads * capacity, D]."""
        return (self.first_row(num_heads)[rows] + slots[:, None]).reshape(-1)

    def first_row(self, num_heads: int) -> torch.Tensor:
        """Returns [B, num_heads, 1] int64: the flat row of each head's first slot. It is always the same tensor."""
        if num_heads not in self._first_row:
            first = torch.arange(self.batch_size * num_heads, device=self.device) * self.capacity
            self._first_row[num_heads] = first.view(self.batch_size, num_heads, 1)
        return self._first_row[num_heads]


class KVLayer(CacheLayerMixin):
    """One layer's [B, H_kv, S, D] keys and values."""

    keys: torch.Tensor
    values: torch.Tensor
    is_compileable = True
    # Every layer stores all positions and the mask applies a sliding window, because rollback needs the old keys.
    is_sliding = False

    def __init__(self, writer: Writer):
        super().__init__()
        self._writer = writer

    def allocate(self, keys: Slot, values: Slot) -> None:
        w = self._writer

        def storage(slot: Slot) -> torch.Tensor:  # zeros: a masked slot must not hold NaN
            shape = (w.batch_size, slot.heads, w.capacity, slot.size)
            return torch.zeros(shape, dtype=w.dtype or slot.dtype, device=w.device)

        self.keys, self.values = storage(keys), storage(values)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.allocate(Slot.of(key_states), Slot.of(value_states))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if (w := self._writer).defers:
            stored = self.keys[w.rows], self.values[w.rows]
            return NewKeys(key_states, value_states, stored, w.slots, w.counter, self._store).deferred()
        return self._store(key_states, value_states)

    def store_and_attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Stores keys and values where the last :meth:`Writer.set` said, and returns what queries see of all that is
        stored, [n, q, H, D_v]; see :func:`specdec_layers.store_and_attend`."""
        w = self._writer
        stored, counter = (self.keys[w.rows], self.values[w.rows]), w.counter(queries.shape[0] * queries.shape[1])
        return store_and_attend(queries, keys, values, *stored, w.slots, seen, angles=angles, counter=counter)

    def _store(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._write(self.keys, keys), self._write(self.values, values)

    def _write(self, storage: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Stores ``states`` [n, H, q, D]. Returns the keys or values that attention reads, in the dtype of ``states``,
        which is that of the queries, unless it reads them as they are stored."""
        w, size, computed = self._writer, states.shape[3], states.dtype
        if w.dtype is not None:
            states = states.to(w.dtype)
        visible = storage[w.rows] if w.as_stored else storage[w.rows, :, : w.visible]
        if w.append_new:
            visible = torch.cat((visible, states), 2)
        # One copy of flat rows was measured to be three times faster than keys[rows, :, slots] = ...
        storage.view(-1, size).index_copy_(0, w.index(states.shape[1]), states.reshape(-1, size))
        return visible if w.as_stored else visible.to(computed)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        w = self._writer
        return (w.visible + query_length if w.append_new else w.visible), 0

    def get_seq_length(self) -> int:
        return self._writer.visible

    def get_max_length(self) -> int:
        return self._writer.capacity

    get_max_cache_shape = get_max_length  # the name of this method in transformers 5.17
