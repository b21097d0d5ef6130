"""A KV cache of fixed size in which every sequence of a batch has its own length."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from ..checks import refuse
from .features import FeatureStore

if TYPE_CHECKING:
    from .compaction import Compaction

VISIBLE_STEP = 64  # attention reads a multiple of this many slots, which makes few distinct shapes and few empty slots


def visible_slots(length: int, capacity: int) -> int:
    """Returns how many slots attention reads if the longest sequence has ``length`` tokens stored. Beyond 1024 tokens
    these are at most an eighth too many, in eight different shapes for each doubling. The trash slot is never visible;
    so attention never reads the whole cache, for which compiled forwards would need another graph."""
    step = max(VISIBLE_STEP, 1 << max((length - 1).bit_length() - 4, 0))
    return min(-(-length // step) * step, capacity - 1)


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


class _Writer:
    """The slots to which the next keys and values go, and the slots that attention sees. Set once a forward and shared
    by all layers.

    The layers refer to this object and not to the cache, because a reference cycle would keep the memory until a
    garbage collection.
    """

    def __init__(self, batch_size: int, capacity: int, device: torch.device, dtype: torch.dtype | None):
        self.batch_size, self.capacity, self.device, self.dtype = batch_size, capacity, device, dtype
        self.visible, self.rows = 0, slice(0, batch_size)
        self.append_new = False
        self._slots = torch.zeros(batch_size, 0, dtype=torch.int64, device=device)
        self._index: dict[int, torch.Tensor] = {}  # by number of heads: this forward's flat rows
        self._first_row: dict[int, torch.Tensor] = {}  # by number of heads: constant

    def set(self, slots: torch.Tensor, visible: int, first_row: int) -> None:
        self._slots, self.visible = slots, visible
        size = slots.shape[0]
        # For all rows the slice has no bounds, because a compiled forward would make bounds constants of its graph.
        self.rows = slice(None) if size == self.batch_size else slice(first_row, first_row + size)
        self._index.clear()

    def index(self, num_heads: int) -> torch.Tensor:
        """Returns the ``flat`` rows of the slots that were set, which are found once a forward."""
        index = self._index.get(num_heads)
        if index is None:
            index = self._index[num_heads] = self.flat(self._slots, num_heads, self.rows)
        return index

    def flat(self, slots: torch.Tensor, num_heads: int, rows: slice = slice(None)) -> torch.Tensor:
        """Returns [n * num_heads * q] int64, in the order of keys [n, num_heads, q, D]: where ``slots`` [n, q] of the n
        ``rows`` are in the storage viewed as [B * num_heads * capacity, D]."""
        if num_heads not in self._first_row:
            first = torch.arange(self.batch_size * num_heads, device=self.device) * self.capacity
            self._first_row[num_heads] = first.view(self.batch_size, num_heads, 1)
        return (self._first_row[num_heads][rows] + slots[:, None]).reshape(-1)


class _Layer(CacheLayerMixin):
    """One layer's [B, H_kv, S, D] keys and values."""

    keys: torch.Tensor
    values: torch.Tensor
    is_compileable = True
    # Every layer stores all positions and the mask applies a sliding window, because rollback needs the old keys.
    is_sliding = False

    def __init__(self, writer: _Writer):
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
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, storage: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Stores ``states`` [n, H, q, D]. Returns the keys or values that attention reads, in the dtype of ``states``,
        which is that of the queries."""
        w, size, computed = self._writer, states.shape[3], states.dtype
        if w.dtype is not None:
            states = states.to(w.dtype)
        visible = storage[w.rows, :, : w.visible]
        if w.append_new:
            visible = torch.cat((visible, states), 2)
        # One copy of flat rows was measured to be three times faster than keys[rows, :, slots] = ...
        storage.view(-1, size).index_copy_(0, w.index(states.shape[1]), states.reshape(-1, size))
        return visible.to(computed)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        w = self._writer
        return (w.visible + query_length if w.append_new else w.visible), 0

    def get_seq_length(self) -> int:
        return self._writer.visible

    def get_max_length(self) -> int:
        return self._writer.capacity

    get_max_cache_shape = get_max_length  # the name of this method in transformers 5.17


class StaticKVCache(Cache):
    """A transformers ``Cache`` whose layers are preallocated [B, H_kv, S, D] tensors, with a length for each
    sequence.

    Keys and values go to the slots given to :meth:`write_at`. Rollback is an assignment to ``lengths``: slots beyond
    are masked, and overwritten later. Nothing is cropped or grown, and only the accepted nodes of a tree are moved. The
    last slot is the *trash slot*: padding and finished sequences write there, and no valid query sees it.

    Args:
        config: the model's configuration; only the number of layers is read.
        batch_size: B.
        capacity: S >= 2, slots of a sequence, the trash slot included: at least the longest sequence + 1.
        device: the device of keys and values.
        append_new: attention reads the stored slots followed by this forward's keys, instead of the slots with the
            new keys among them. For models that build positions from a 2-D mask (ALiBi).
        dtype: keys and values are rounded to it for storage, and converted back when read; None: they are stored in
            the dtype in which the model computes them.

    Attributes:
        lengths: [B] int64 on ``device``, the number of each sequence's tokens whose keys are stored. A step sets them
            before its forwards, to [n] if it has the first n rows only.
        features: what forwards over this cache record of the model's hidden states; None: nothing.
    """

    layers: list[_Layer]  # type: ignore[assignment]  # transformers declares its own kinds of layers

    def __init__(
        self,
        config: PreTrainedConfig,
        batch_size: int,
        capacity: int,
        device: torch.device | str,
        append_new: bool = False,
        dtype: torch.dtype | None = None,
    ):
        if capacity < 2:
            raise ValueError(f"capacity: got {capacity}, allowed: >= 2 (one token and the trash slot)")
        device = torch.device(device)
        self._writer = _Writer(batch_size, capacity, device, dtype)
        self._writer.append_new = append_new
        layers = config.get_text_config(decoder=True).num_hidden_layers
        super().__init__(layers=[_Layer(self._writer) for _ in range(layers)])
        self.capacity, self.trash = capacity, capacity - 1
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._used_rows: set[int] = set()  # rows that have held a sequence
        self.features: FeatureStore | None = None
        self._compaction: Compaction | None = None

    def allocate(self, slots: Sequence[LayerSlot]) -> None:
        """Allocates all storage now, so that nothing grows later. A layer whose slot is None is allocated when it
        first stores keys."""
        for layer, slot in zip(self.layers, slots, strict=True):
            if slot is not None:
                layer.allocate(*slot)

    def write_at(self, slots: torch.Tensor, visible: int, first_row: int = 0) -> None:
        """Sets the slots to which the next forward's keys and values go, [n, q] int64 in [0, S), and how many slots it
        sees. A forward of n < B sequences uses the rows from ``first_row`` on."""
        self._writer.set(slots, visible, first_row)

    def begin(self, row: int) -> None:
        """Prepares ``row`` for a new sequence. Keys and values of the row's previous sequence become zero, since a NaN
        among them would spoil the new one: masked slots have weight 0, but 0 times NaN is NaN."""
        if row not in self._used_rows:
            self._used_rows.add(row)
            return
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[row].zero_()
                layer.values[row].zero_()

    def show(self, visible: int) -> None:
        """Sets how many slots the next forward sees, and leaves the slots to which it writes as they are."""
        self._writer.visible = visible

    def compact(self, path: torch.Tensor) -> None:
        """Moves the keys, values and features of the accepted nodes of each sequence's tree to the slots after the
        root's, which is slot ``lengths``: where they would be, had they been fed as text. ``lengths`` stays as it is.
        Nothing waits for the device, and all shapes follow from that of ``path``.

        Args:
            path: [n, D] int64 for the first n rows, whose ``lengths`` were set: the numbers of the accepted nodes from
                the root down, then -1 (``verify_tree``).
        """
        root, accepted = self.lengths[:, None], path >= 0
        index = torch.arange(1, path.shape[1] + 1, device=path.device)
        old = torch.where(accepted, root + 1 + path, self.trash)
        new = torch.where(accepted, root + index, self.trash)
        if self.features is not None:
            self.features.move(old, new)
        if path.is_cuda and importlib.util.find_spec("triton") is not None:
            self._all_layers()(self.lengths, path)
            return
        rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by number of heads
        for states in self.storage():
            heads, size = states.shape[1], states.shape[3]
            if heads not in rows:
                first = slice(len(path))
                rows[heads] = self._writer.flat(old, heads, first), self._writer.flat(new, heads, first)
            flat, (source, target) = states.view(-1, size), rows[heads]
            # All are read before any is written: a slot can be both the old one of a node and the new one of another.
            flat.index_copy_(0, target, flat.index_select(0, source))

    def _all_layers(self) -> Compaction:
        """Returns what moves the nodes of all layers in one launch."""
        storage = self.storage()
        if self._compaction is None or len(self._compaction.storages) < len(storage):
            from .compaction import Compaction

            self._compaction = Compaction(storage)
        return self._compaction

    def storage(self) -> list[torch.Tensor]:
        """Returns all keys and values, [B, H_kv, S, D] each."""
        return [states for layer in self.layers if layer.is_initialized for states in (layer.keys, layer.values)]

    def index_rows(self) -> list[torch.Tensor]:
        """Computes and returns the storage rows that the layers write to, so that a compiled forward finds them."""
        heads = {layer.keys.shape[1] for layer in self.layers if layer.is_initialized}
        return [self._writer.index(num_heads) for num_heads in sorted(heads)]


def check_cache_dtype(dtype: torch.dtype | None, computes: torch.dtype) -> None:
    """Raises ValueError unless ``dtype`` is None, ``computes``, or a narrower floating dtype of 16 bits or more. The
    dtype of the model's keys is only known once it runs (``stored_dtype``)."""
    if dtype is None:
        return
    known = isinstance(dtype, torch.dtype) and dtype.is_floating_point and 2 <= dtype.itemsize <= computes.itemsize
    if not known or (dtype != computes and dtype.itemsize == computes.itemsize):
        refuse("cache_dtype", dtype, f"None, or a floating dtype of 16 bits or more, narrower than {computes}")


def stored_dtype(
    model: str, what: str, comes: torch.dtype, computes: torch.dtype, asked: torch.dtype | None
) -> torch.dtype:
    """Returns the dtype in which keys or values are stored.

    Args:
        model: the model's name, for errors.
        what: "keys" or "values", for errors.
        comes: the dtype in which the model computes them.
        computes: the dtype of the model's hidden states.
        asked: ``cache_dtype``, as the caller gave it.

    Raises:
        ValueError: ``comes`` is narrower than ``computes`` and ``asked`` does not accept it; or ``asked`` is not
            narrower than ``comes``.
    """
    if asked is None and comes.itemsize < computes.itemsize:
        given = f"{what} that come as {comes} from a model that computes in {computes} (autocast?)"
        refuse(model, given, f"cache_dtype={comes} to accept it")
    if asked not in (None, comes) and asked.itemsize >= comes.itemsize:
        refuse("cache_dtype", asked, f"None, or narrower than {comes}, as which the {model}'s {what} come")
    return asked or comes
