"""A KV cache of fixed size in which every sequence of a batch has its own length."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ...checks import refuse
from .dropped import Dropped
from .features import FeatureStore
from .kv_layer import KVLayer, LayerSlot, Slot, Writer
from .recurrent_layer import Committed, RecurrentLayer
from .tree import Tree

if TYPE_CHECKING:
    from .compaction import Compaction

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")  # the first one since transformers 5.24
VISIBLE_STEP = 64  # attention reads a multiple of this many slots, which makes few distinct shapes and few empty slots


def cache_argument(module: nn.Module) -> str:
    """Returns what the forward of a model, or of one of its layers, calls its cache: "cache" since transformers 5.24;
    before, and in code of others, "past_key_values", or "cache_params" where all layers are recurrent. A forward that
    names none hands all on to that of a class before it."""
    for kind in type(module).__mro__:
        named = inspect.signature(vars(kind).get("forward", nn.Module.forward)).parameters
        if found := [name for name in CACHE_ARGUMENTS if name in named]:
            return found[0]
    return "past_key_values"


def visible_slots(length: int, capacity: int) -> int:
    """Returns how many slots attention reads if the longest sequence has ``length`` tokens stored. Beyond 1024 tokens
    these are at most an eighth too many, in eight different shapes for each doubling. The trash slot is never visible;
    so attention never reads the whole cache, for which compiled forwards would need another graph."""
    step = max(VISIBLE_STEP, 1 << max((length - 1).bit_length() - 4, 0))
    return min(-(-length // step) * step, capacity - 1)


class StaticKVCache(Cache):
    """A transformers ``Cache`` whose layers are preallocated [B, H_kv, S, D] tensors, with a length for each
    sequence.

    Keys and values go to the slots given to :meth:`write_at`. Rollback is an assignment to ``lengths``: slots beyond
    are masked, and overwritten later. Nothing is cropped or grown, and only the accepted nodes of a tree are moved. The
    last slot is the *trash slot*: padding and finished sequences write there, and no valid query sees it.

    The states of recurrent layers follow the same assignment: the next forward of the sequence finds by its first
    token's position which of the tokens before are part of the text, and takes these into the state.

    Args:
        config: the model's configuration; only the number of layers is read.
        batch_size: B.
        capacity: S >= 2, slots of a sequence, the trash slot included: at least the longest sequence + 1.
        device: the device of keys and values.
        append_new: attention reads the stored slots followed by this forward's keys, instead of the slots with the
            new keys among them. For models that build positions from a 2-D mask (ALiBi).
        dtype: keys and values are rounded to it for storage, and converted back when read; None: they are stored in
            the dtype in which the model computes them.
        recurrent: the layers that have a state.
        window: the most tokens of a sequence that are fed in a step, over all its forwards, >= 1; more can be fed only
            as text that is never rolled back.
        as_stored: attention reads keys and values in the dtype in which they are stored.

    Attributes:
        lengths: [B] int64 on ``device``, the number of each sequence's tokens whose keys are stored. A step sets them
            before its forwards, to [n] if it has the first n rows only.
        features: what forwards over this cache record of the model's hidden states; None: nothing.
        dropped: which tokens of its text each row has no longer; None: no row drops any.
    """

    layers: list[KVLayer]  # type: ignore[assignment]  # transformers declares its own kinds of layers

    def __init__(
        self,
        config: PreTrainedConfig,
        batch_size: int,
        capacity: int,
        device: torch.device | str,
        append_new: bool = False,
        dtype: torch.dtype | None = None,
        recurrent: Collection[int] = (),
        window: int = 1,
        as_stored: bool = False,
    ):
        if capacity < 2:
            raise ValueError(f"capacity: got {capacity}, allowed: >= 2 (one token and the trash slot)")
        device = torch.device(device)
        self._writer = Writer(batch_size, capacity, device, dtype, window)
        self._writer.append_new, self._writer.as_stored = append_new, as_stored
        count = config.get_text_config(decoder=True).num_hidden_layers
        kinds = [RecurrentLayer if i in recurrent else KVLayer for i in range(count)]
        super().__init__(layers=[kind(self._writer) for kind in kinds])
        self.recurrent = [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]
        self.rows, self.capacity, self.trash = batch_size, capacity, capacity - 1
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._committed = Committed(batch_size, window, device)
        self._used_rows: set[int] = set()  # rows that have held a sequence
        self.features: FeatureStore | None = None
        self.dropped: Dropped | None = None
        self._compaction: Compaction | None = None

    def allocate(self, slots: Sequence[LayerSlot], states: Sequence[RecurrentLayer] = ()) -> None:
        """Allocates all storage now, so that nothing grows later. A layer whose slot is None is allocated when it
        first stores keys.

        Args:
            states: the recurrent layers of another cache of the same model.
        """
        for layer, slot in zip(self.layers, slots, strict=True):
            if slot is not None:
                layer.allocate(*slot)
        for own, other in zip(self.recurrent, states, strict=True):
            own.allocate_like(other)

    def write_at(
        self,
        slots: torch.Tensor,
        visible: int,
        first_row: int = 0,
        keep: bool = False,
        tree: Tree | None = None,
        defers: bool = False,
    ) -> None:
        """Sets the slots to which the next forward's keys and values go, [n, q] int64 in [0, S), and how many slots it
        sees. A forward of n < B sequences uses the rows from ``first_row`` on.

        Args:
            keep: these tokens are never rolled back, as those of a prompt.
            tree: which tokens they follow, if they are no chain.
            defers: the forward's attention stores them itself.
        """
        self._writer.set(slots, visible, first_row, defers)
        if self.recurrent:
            lengths = self.lengths[first_row : first_row + len(slots)]
            self._writer.feed = self._committed.feed(slots, slots != self.trash, lengths, first_row, keep, tree)

    def committed(self) -> list[int]:
        """Returns how many tokens of each row can no longer be rolled back: 0 where no layer has a state, otherwise
        what the host waits for the device to know."""
        return self._committed.counts.tolist() if self.recurrent else [0] * self.rows

    def begin(self, row: int, kept: int = 0) -> None:
        """Prepares ``row`` for a new sequence, whose first ``kept`` tokens are stored there. Other keys and values of
        the row's previous sequence become zero, since a NaN among them would spoil the new one: masked slots have
        weight 0, but 0 times NaN is NaN."""
        if row not in self._used_rows:
            self._used_rows.add(row)
            return
        self._committed.counts[row] = 0
        if self.dropped is not None:
            self.dropped.forget(row)
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[row, :, kept:].zero_()
                layer.values[row, :, kept:].zero_()

    def restart(self) -> None:
        """Prepares all rows for new sequences, where no attention reads what is in their slots now."""
        self.lengths = torch.zeros(self.rows, dtype=torch.int64, device=self._writer.device)
        self._used_rows = set(range(self.rows))
        if self.dropped is not None:
            self.dropped.forget(*range(self.rows))

    def copy_rows(self, sources: Sequence[int], rows: Sequence[int], count: int) -> None:
        """Copies what is stored of the first ``count`` tokens in the rows ``sources`` to the rows ``rows``. All is read
        before anything is written. The states of recurrent layers are not copied: a state is that of one length."""
        if count == 0 or list(sources) == list(rows):
            return
        self._used_rows.update(rows)
        stored = [states[:, :, :count] for states in self.storage()]
        if self.features is not None:
            stored += [self.features.features[:, :count], self.features.tokens[:, :count]]
        for states in stored:
            taken = [states[source].clone() for source in sources]
            for row, own in zip(rows, taken, strict=True):
                states[row].copy_(own)

    def compact(self, path: torch.Tensor) -> None:
        """Moves what is stored of the accepted nodes of each sequence's tree to the slots after the root's, which is
        slot ``lengths``: where they would be, had they been fed as text. ``lengths`` stays as it is. Nothing waits for
        the device, and all shapes follow from that of ``path``.

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
        old, new = torch.where(accepted, old, root + index), root + index  # the windows have no trash slot
        row = torch.arange(len(path), device=path.device)[:, None]
        for window in self._windows():
            places = window.shape[1]
            window[row, new % places] = window[row, old % places]

    def _all_layers(self) -> Compaction:
        """Returns what moves the nodes of all layers in one launch."""
        storage = [*self.storage(), *(window.flatten(2)[:, None] for window in self._windows())]
        if self._compaction is None or len(self._compaction.storages) < len(storage):
            from .compaction import Compaction

            self._compaction = Compaction(storage)
        return self._compaction

    def storage(self) -> list[torch.Tensor]:
        """Returns all keys and values, [B, H_kv, S, D] each."""
        return [states for layer in self.layers if layer.is_initialized for states in (layer.keys, layer.values)]

    def slots(self) -> tuple[LayerSlot, ...]:
        """Returns what is stored of one token in each layer; None of a layer that has stored nothing."""
        return tuple((Slot.of(x.keys), Slot.of(x.values)) if x.is_initialized else None for x in self.layers)

    @property
    def form(self) -> tuple[Hashable, ...]:
        """What is the same in two caches of a model whose tensors differ in nothing but the number of slots."""
        w, features = self._writer, self.features
        kept = None if features is None else (features.states, features.combine)
        sinks = None if self.dropped is None else self.dropped.sinks
        return w.batch_size, w.window, w.append_new, w.as_stored, w.dtype, kept, sinks

    def tensors(self) -> list[torch.Tensor]:
        """Returns all tensors of the cache that forwards read or write."""
        found = [self._committed.counts, *self.storage()]
        found += [self._writer.first_row(states.shape[1]) for states in self.storage()]
        for layer in self.recurrent:
            found += [part for part in (layer.inputs, *(layer.state or ())) if part is not None]
        found += [] if self.dropped is None else [self.dropped.counts]
        return found if self.features is None else found + self.features.tensors()

    def _windows(self) -> list[torch.Tensor]:
        return [window for layer in self.recurrent for window in layer.windows()]


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
