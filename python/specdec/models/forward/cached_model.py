"""Runs one Hugging Face model over its static cache, with a slot, a position and a mask for every fed token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..cache.kept_cache import KeptCache, with_room
from ..cache.kv_cache import StaticKVCache, check_cache_dtype, stored_dtype
from ..cache.kv_layer import LayerSlot, Slot
from ..cache.tree import Tree
from ..exchanged.stored_weights import computing_dtype
from ..machine.free_memory import free_memory
from .attention_choice import choose
from .forwards import Forwards, RecordedForwards
from .layout import Layout
from .max_length import max_length
from .prefill import PREFILL_TOKENS, OnLogits, PrefillChunk, Reading
from .step_attention import step_attention


class CachedModel:
    """A causal LM that is called with explicit positions, slots and masks. All state of a generation is in the cache.

    What kind of model it is, is decided once: ``attention`` knows which masks and slots it needs, and ``forwards`` how
    its modules are run.

    Args:
        model: a decoder-only ``PreTrainedModel`` in evaluation mode; ``specdec.models.supported`` lists which.
        name: the model's name in errors.
        attention: "auto", "model", "flex", "native" or "fused" (``attention_choice.choose``). Flex and fused serve
            decoding steps; prompts are then read with the model's own attention.
        cache_dtype: the dtype to which its caches round keys and values; None: they are stored as computed.
        fed_vocabulary: the ids that the model is fed are below this. An id beyond its embedding is replaced by the
            embedding's last one. None: the embedding covers all ids.
        forwards: the kind of ``Forwards`` that runs the modules; None: the device decides.

    Attributes:
        attention: of decoding forwards.
        forwards: what runs them, and those of prompts.
        max_length: how many positions the model has; None: no limit.
        prefill_chunk: how many tokens, padding included, one prefill forward is fed.
        recurrent: the numbers of the layers that have a state. They are fed a tree whole, or not at all.
        reads_only_filled: whether a step's attention reads only the stored slots, whatever ``visible`` is.
        slot_step: capacities should be multiples of this many slots, because flex attention is compiled for each one.
        lacks_trees: why the model cannot be fed a tree, whatever its mask; None: it can.
        is_sharded: whether other ranks have parts of the weights, and of keys and values (``sharded``).

    Raises:
        ValueError: names ``attention`` or ``cache_dtype``, what was given and what is allowed.
    """

    is_sharded = False

    def __init__(
        self,
        model: PreTrainedModel,
        name: str = "model",
        attention: str = "auto",
        cache_dtype: torch.dtype | None = None,
        fed_vocabulary: int | None = None,
        forwards: Callable[..., Forwards] | None = None,
    ):
        self.model, self.name = model, name
        self.config = model.config.get_text_config(decoder=True)
        self.device, self.dtype = model.device, computing_dtype(model)
        check_cache_dtype(cache_dtype, self.dtype)
        self.cache_dtype = cache_dtype
        self.prefill_chunk = PrefillChunk(PREFILL_TOKENS)
        self.max_length = max_length(self.config)
        self.vocab_size: int = self.config.vocab_size
        # Quantised weights may have other shapes, so the layers' own numbers are read first.
        table: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        self.num_embeddings: int = getattr(table, "num_embeddings", None) or table.weight.shape[0]
        self.num_outputs: int = getattr(head, "out_features", None) or head.weight.shape[0]
        largest = None if self.num_embeddings >= (fed_vocabulary or 0) else self.num_embeddings - 1

        self.attention = step_attention(choose(model, attention), model, cache_dtype)
        self.reads_only_filled, self.slot_step = self.attention.reads_only_filled, self.attention.slot_step
        records = self.device.type == "cpu" and not self.attention.only_steps
        kind = forwards or (RecordedForwards if records else Forwards)
        self.forwards = kind(model, name, self.attention, largest)
        self.forwards.renew()
        self.recurrent = self.forwards.recurrent
        self.lacks_trees: str | None = None  # both reasons are ALiBi's
        if self.attention.append_new:
            self.lacks_trees = "takes its positions from a 2-D mask"
        elif not (self.forwards.takes_positions or self.recurrent):  # with recurrent layers it needs none
            self.lacks_trees = "takes its positions from the order of the slots"
        self._kept = KeptCache()
        self._probes: dict[torch.dtype | None, StaticKVCache] = {}  # by autocast dtype

    @property
    def first_runs(self) -> int:
        """How many forwards on a CPU took longer than they will when they come again."""
        return self.forwards.first_runs

    def capacity(self, tokens: int, nodes: int = 0) -> int:
        """Returns the slots of a row for sequences of up to ``tokens`` tokens with a tree of up to ``nodes`` nodes, the
        trash slot included."""
        return -(-(tokens + nodes + 1) // self.slot_step) * self.slot_step

    def free_memory(self) -> int | None:
        """Returns the bytes that can be allocated on the model's device now; None: that is not known."""
        return free_memory(self.device)

    def with_whole_ends(self) -> PreTrainedModel:
        """Returns the model, for those who use its embedding or its head alone."""
        return self.model

    # ---- its caches

    def new_cache(self, batch_size: int, capacity: int, window: int = 1) -> StaticKVCache:
        """Returns a cache with all its memory allocated: a new one, or one that was kept, which may have more slots.

        Args:
            window: the most tokens of a sequence that a step feeds this model, over all its forwards; only recurrent
                layers need to know it.

        Raises:
            ValueError: as :meth:`stored_slots`.
        """
        self.forwards.renew()
        slots = self.stored_slots()
        if (kept := self._kept.take(batch_size, capacity, slots)) is not None:
            return kept
        cache = self._cache(batch_size, capacity, self.cache_dtype, window)
        cache.allocate(slots, self._probe().recurrent)
        return cache

    def keep(self, cache: StaticKVCache) -> None:
        """Takes back a cache that nobody uses any more, for one of the next texts."""
        if self._keeps:
            self._kept.give(cache)

    def with_room(self, rows: int, tokens: int) -> int:
        """Returns for how many tokens the rows of a cache should have room if ``tokens`` are needed."""
        if not (self._keeps and rows):
            return tokens
        roomy = with_room(tokens, rows * self.slot_bytes())
        return max(tokens, roomy if self.max_length is None else min(roomy, self.max_length))

    @property
    def _keeps(self) -> bool:
        return self.reads_only_filled and self.forwards.is_recorded and not self.recurrent

    def _cache(self, batch_size: int, capacity: int, dtype: torch.dtype | None, window: int) -> StaticKVCache:
        own = self.config, batch_size, capacity, self.device, self.attention.append_new
        return StaticKVCache(*own, dtype, self.recurrent, window, as_stored=self.attention.is_native)

    def _probe(self) -> StaticKVCache:
        """Returns a small cache that one token was fed into, once for each autocast dtype: head counts, head sizes,
        states and dtypes can differ by layer and between keys and values, and neither the configuration nor quantised
        weights tell all of them."""
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if autocast not in self._probes:
            cache = self._cache(1, 2, None, 1)
            with torch.inference_mode():
                self.prefill(cache, [[0]])
            self._probes[autocast] = cache
        return self._probes[autocast]

    def layer_slots(self) -> tuple[LayerSlot, ...]:
        """Returns what each layer computes to be stored of one token."""
        return self._probe().slots()

    def row_bytes(self, window: int) -> int:
        """Returns the bytes of the states of one sequence, with a window of so many tokens, over all layers."""
        return sum(layer.row_bytes(window) for layer in self._probe().recurrent)

    def stored_slots(self) -> tuple[LayerSlot, ...]:
        """Returns ``layer_slots`` with the dtypes in which keys and values are stored.

        Raises:
            ValueError: keys or values are narrower than the model's hidden states and ``cache_dtype`` does not accept
                it, or ``cache_dtype`` is not narrower than they are.
        """

        def stored(what: str, slot: Slot) -> Slot:
            return slot._replace(dtype=stored_dtype(self.name, what, slot.dtype, self.dtype, self.cache_dtype))

        pairs = self.layer_slots()
        return tuple(None if p is None else (stored("keys", p[0]), stored("values", p[1])) for p in pairs)

    def slot_bytes(self) -> int:
        """Returns the bytes of the keys and values of one token of one sequence, over all layers.

        Raises:
            ValueError: as :meth:`stored_slots`.
        """
        return sum(slot.bytes for pair in self.stored_slots() if pair is not None for slot in pair)

    def bytes_beside_caches(self, rows: int, slots: int, tokens: int) -> int:
        """Returns the most bytes that attention takes for a while, beside caches of ``rows`` rows of so many slots, in
        forwards of up to ``tokens`` tokens of a row. What else forwards compute is not counted."""
        return self.attention.bytes_beside_caches(self.layer_slots(), rows, slots, tokens)

    # ---- its forwards

    def layout(self, positions: torch.Tensor, slots: torch.Tensor, visible: int, tree: Tree | None = None) -> Layout:
        """Returns the layout of tokens at ``positions`` [B, q] int64 stored in ``slots`` [B, q] int64, with the masks
        that this model needs. ``visible`` comes from ``visible_slots``; those of a tree come from ``Tree.places``."""
        return self.attention.layout(positions, slots, visible, tree)

    def __call__(self, tokens: torch.Tensor, cache: StaticKVCache, layout: Layout) -> torch.Tensor:
        """Feeds ``tokens`` [B, q] int64 and stores their keys and values. Returns logits [B, q, V]."""
        return self.forwards.step(tokens, cache, layout)

    def prefill(
        self, cache: StaticKVCache, sequences: Sequence[Sequence[int]], on_logits: OnLogits | None = None
    ) -> None:
        """Stores the keys and values of whole sequences of token ids from slot 0 on, and sets ``cache.lengths``.
        Logits are computed only for ``on_logits``, as in ``extend``."""
        self.extend(cache, sequences, [0] * len(sequences), 0, on_logits)

    def extend(
        self,
        cache: StaticKVCache,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        first_row: int = 0,
        on_logits: OnLogits | None = None,
    ) -> None:
        """Does what ``prefill`` does for sequences whose first ``starts`` tokens are already stored, in the rows from
        ``first_row`` on. Tokens are fed in chunks of columns, which become smaller for good, with a warning, when
        memory runs out.

        Args:
            on_logits: called after each forward for every sequence that it was fed tokens of. A forward then has at
                most 1024 tokens (or one column), whose logits are never all kept. If memory runs out in a call, the
                same position comes again, with fewer tokens; otherwise each token's logits come once, in order.
        """
        Reading(self.forwards, cache, sequences, starts, first_row, on_logits).run(self.prefill_chunk)
