"""Runs one Hugging Face model over its static cache, with a slot, a position and a mask for every fed token."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from specdec_kernels import MOST_ATTENDING, bytes_beside_caches, native_threads

from ...checks import refuse
from ..cache.kept_cache import KeptCache
from ..cache.kv_cache import StaticKVCache, cache_argument, check_cache_dtype, stored_dtype, visible_slots
from ..cache.kv_layer import LayerSlot, Slot
from ..cache.tree import Tree
from ..exchanged.copied_modules import numbers_in, same_objects
from ..exchanged.decoder_layers import with_native_layers
from ..exchanged.huge_pages import move_to_huge_pages, read_whole
from ..exchanged.linear import is_native, with_native_linear
from ..exchanged.merged import is_merged_as_before, with_merged
from ..exchanged.native_parts import with_native_parts
from ..exchanged.stored_weights import stores_bfloat16
from ..machine.free_memory import free_memory
from .attention import MAX_QUERIES, Mask, Queries, block_mask, can_be_fused, dense_mask, seen_slots, with_attention
from .attention_choice import choose, has_sinks
from .compiled import CompiledForward, compiled_copy
from .prefill import PrefillChunk
from .recorded import RecordedForwards, is_recordable
from .recurrent import recurrent_layers, with_recurrence
from .training_mode import check_evaluating

T = TypeVar("T")
# Called for a sequence, by its index, with the position of the first fed token and the logits [n, V] after each.
OnLogits = Callable[[int, int, torch.Tensor], None]
FLEX_STEP = 256  # slots
PREFILL_TOKENS = 8192  # most tokens of one prefill forward; its intermediate results are freed before the next one
LOGITS_TOKENS = 1024  # most tokens of one prefill forward whose logits are asked for
# Of a forward of several tokens, before it is recorded, since a short text has few steps of some widths: to record one
# takes as long as so many runs lose.
RARE_RUNS = 3
_RECURRENT_LAYERS = ("linear_attention", "conv")  # what models call them where masks are given by kind of layer


class Layout(NamedTuple):
    """The positions, slots and masks of the q tokens that each sequence is fed in one or several forwards. It can be
    split by columns, so a step computes it once for all its forwards.

    Padding (after short prompts, for drafts that do not count, in finished sequences) has position 0, which every
    model has, and the trash slot, which no query sees.
    """

    positions: torch.Tensor  # [B, q] int64
    slots: torch.Tensor  # [B, q] int64, equal to positions except for padding and the nodes of a tree
    visible: int  # slots that attention reads
    mask: Mask | None  # [B, 1, q, visible], or one for each kind of layer; None if the forward itself makes it
    tree: Tree | None = None  # the q tokens are all of this tree's, or its last ones

    def split(self, sizes: list[int]) -> list[Layout]:
        """Returns consecutive layouts with these numbers of columns. A tree is fed whole."""
        assert self.tree is None, "a tree cannot be split"
        masks: Sequence[Mask | None]
        if isinstance(self.mask, dict):
            by_kind = [m.split(sizes, 2) for m in self.mask.values()]
            masks = [dict(zip(self.mask, parts, strict=True)) for parts in zip(*by_kind, strict=True)]
        else:
            masks = [None] * len(sizes) if self.mask is None else self.mask.split(sizes, 2)
        cut = zip(self.positions.split(sizes, 1), self.slots.split(sizes, 1), masks, strict=True)
        return [Layout(positions, slots, self.visible, mask) for positions, slots, mask in cut]


def _max_length(config: PreTrainedConfig) -> int | None:
    """Returns how many positions the model has that do not influence earlier ones; None: no limit.

    Dynamic and long RoPE change all frequencies once a forward reaches past the original length: a draft there, or
    a longer sequence of the batch, would change earlier tokens.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]  # the latter: MPT
    for r in by_layer_type:
        if r.get("rope_type") in ("dynamic", "longrope"):
            limits.append(r.get("original_max_position_embeddings"))
    return min((n for n in limits if n is not None), default=None)


def computing_dtype(model: PreTrainedModel) -> torch.dtype:
    """Returns the dtype of the hidden states: that of the first parameter that is not quantised (not an integer or an
    8-bit float), unless it is only stored in that."""
    if stores_bfloat16(model):
        return model.dtype
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point() and p.itemsize > 1)
    configured = model.config.dtype
    default = configured if isinstance(configured, torch.dtype) else torch.get_default_dtype()
    return next(dtypes, default)


class CachedModel:
    """A causal LM that is called with explicit positions, slots and masks. All state of a generation is in the cache.

    Args:
        model: a decoder-only ``PreTrainedModel`` in evaluation mode; ``specdec.models.supported`` lists which.
        name: the model's name in errors.
        attention: "auto", "model", "flex", "native" or "fused" (``attention_choice.choose``). Flex and fused serve
            decoding steps; prompts are then read with the model's own attention.
        cache_dtype: the dtype to which its caches round keys and values; None: they are stored as computed.
        compile: decoding forwards go through ``torch.compile``, with the model's own modules. Prefill runs uncompiled,
            because every prompt has its own length and runs once.
        fed_vocabulary: the ids that the model is fed are below this. An id beyond its embedding is replaced by the
            embedding's last one. None: the embedding covers all ids.

    Attributes:
        prefill_chunk: how many tokens, padding included, one prefill forward is fed.
        recurrent: the numbers of the layers that have a state. They are fed a tree whole, or not at all.
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
        compile: bool = False,
        fed_vocabulary: int | None = None,
    ):
        self.model, self.name = model, name
        self.config = model.config.get_text_config(decoder=True)
        self.device, self.dtype = model.device, computing_dtype(model)
        check_cache_dtype(cache_dtype, self.dtype)
        self.cache_dtype, self._fed_vocabulary = cache_dtype, fed_vocabulary
        self.prefill_chunk = PrefillChunk(PREFILL_TOKENS)
        self.vocab_size: int = self.config.vocab_size
        # Quantised weights may have other shapes, so the layers' own numbers are read first.
        table: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        self.num_embeddings: int = getattr(table, "num_embeddings", None) or table.weight.shape[0]
        self.num_outputs: int = getattr(head, "out_features", None) or head.weight.shape[0]
        self._lacks_tokens = fed_vocabulary is not None and self.num_embeddings < fed_vocabulary
        self.max_length = _max_length(self.config)
        # Models with ALiBi (Bloom, some Falcons) build it from a 2-D mask, and reject a 4-D one.
        self.needs_2d_mask = self.config.model_type == "bloom" or bool(getattr(self.config, "alibi", False))
        # Eager attention adds its mask to the scores. On a CPU the others do so as well, and would convert a boolean
        # mask in every layer.
        self._float_mask = self.config._attn_implementation == "eager" or self.device.type == "cpu"
        self._zero = torch.zeros((), dtype=self.dtype, device=self.device)  # masks of two numbers would be float32
        self._window = getattr(self.config, "sliding_window", None)
        layer_types = set(getattr(self.config, "layer_types", None) or ())
        self._mixed_layers = "sliding_attention" in layer_types and len(layer_types) > 1
        if layer_types and "sliding_attention" not in layer_types:
            self._window = None
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._takes_cache_as = cache_argument(model)
        self.recurrent = frozenset(recurrent_layers(model))
        if compile and self.recurrent:
            refuse(
                "compile", f"True for model type {self.config.model_type!r}", "False for models with recurrent layers"
            )
        self._key_index: dict[int, torch.Tensor] = {}  # by length; kept because captured steps read them
        self._probes: dict[torch.dtype | None, StaticKVCache] = {}  # by autocast dtype
        self._attention = choose(model, "model" if compile else attention)
        self._flexes = self._attention in ("flex", "fused") and not has_sinks(model)
        self._compile = compile
        self._compiled: CompiledForward | None = None
        self._steps = model
        self._inside: list[object] = []
        self._numbers: tuple[object, ...] = ()
        self._kept = KeptCache()
        self._take_attention()

    @property
    def reads_only_filled(self) -> bool:
        """Whether a step's attention reads only the stored slots, whatever ``visible`` is. It does not where the cache
        has a narrower dtype: all visible keys are then converted before they are read."""
        return self._attention == "native" or self._by_flex

    @property
    def _by_flex(self) -> bool:
        return self._flexes and self.cache_dtype in (None, self.dtype)

    def _fuses(self, tokens: int, tree: Tree | None) -> bool:
        """Whether one kernel stores so many tokens of a sequence and attends to them, in a layer."""
        fused = self._attention == "fused" and self.cache_dtype in (None, self.dtype)
        return fused and can_be_fused(tokens, tree)

    @property
    def attention(self) -> str:
        """How a decoding forward's attention is computed, as ``attention_choice.choose`` says it."""
        return self._attention

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    @property
    def first_runs(self) -> int:
        """How many small forwards on a CPU took longer than they will when they come again."""
        return self._recorded.first_runs if self._records else 0

    @property
    def is_recorded(self) -> bool:
        """Whether decoding forwards are recorded and replayed, where they can be."""
        return self._records

    @property
    def steps(self) -> PreTrainedModel:
        """The copy of the model whose modules a decoding forward runs."""
        return self._steps

    @property
    def slot_step(self) -> int:
        """Capacities should be multiples of this many slots, because flex attention is compiled for each capacity."""
        return FLEX_STEP if self._by_flex else 1

    @property
    def lacks_trees(self) -> str | None:
        """Why the model cannot be fed a tree, whatever its mask; None: it can. The last two reasons are ALiBi's."""
        if self.needs_2d_mask:
            return "takes its positions from a 2-D mask"
        # Models with recurrent layers that are told no positions need none.
        return None if self._takes_positions or self.recurrent else "takes its positions from the order of the slots"

    def capacity(self, tokens: int, nodes: int = 0) -> int:
        """Returns the slots of a row for sequences of up to ``tokens`` tokens with a tree of up to ``nodes`` nodes, the
        trash slot included."""
        return -(-(tokens + nodes + 1) // self.slot_step) * self.slot_step

    def compiled(self) -> CachedModel:
        """Returns the same model with ``compile=True``."""
        return CachedModel(self.model, self.name, "auto", self.cache_dtype, True, self._fed_vocabulary)

    def free_memory(self) -> int | None:
        """Returns the bytes that can be allocated on the model's device now; None: that is not known."""
        return free_memory(self.device)

    def with_whole_ends(self) -> PreTrainedModel:
        """Returns the model, for those who use its embedding or its head alone."""
        return self.model

    def new_cache(self, batch_size: int, capacity: int, window: int = 1) -> StaticKVCache:
        """Returns a cache with all its memory allocated: a new one, or one that was kept, which may have more slots.

        Args:
            window: the most tokens of a sequence that a step feeds this model, over all its forwards; only recurrent
                layers need to know it.

        Raises:
            ValueError: as :meth:`stored_slots`.
        """
        self._take_attention()
        slots = self.stored_slots()
        if (kept := self._kept.take(batch_size, capacity, slots)) is not None:
            return kept
        cache = self._cache(batch_size, capacity, self.cache_dtype, window)
        cache.allocate(slots, self._probe().recurrent)
        return cache

    def keep(self, cache: StaticKVCache) -> None:
        """Takes back a cache that nobody uses any more, for one of the next texts."""
        if self._attention == "native" and self._records:
            self._kept.give(cache)

    def _cache(self, batch_size: int, capacity: int, dtype: torch.dtype | None, window: int) -> StaticKVCache:
        own = self.config, batch_size, capacity, self.device, self.needs_2d_mask
        return StaticKVCache(*own, dtype, self.recurrent, window, as_stored=self._attention == "native")

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
        if self._attention != "fused":
            return 0
        heads = self.config.num_attention_heads
        group = max(heads // (getattr(self.config, "num_key_value_heads", None) or heads), 1)
        layers = {
            (keys.heads, values.size) for pair in self.layer_slots() if pair is not None for keys, values in [pair]
        }
        counts = rows, min(tokens, MOST_ATTENDING)
        return max((bytes_beside_caches(*counts, n, group, slots, size, self.dtype) for n, size in layers), default=0)

    def layout(self, positions: torch.Tensor, slots: torch.Tensor, visible: int, tree: Tree | None = None) -> Layout:
        """Returns the layout of tokens at ``positions`` [B, q] int64 stored in ``slots`` [B, q] int64, with the masks
        that this model needs. ``visible`` comes from ``visible_slots``; those of a tree come from ``Tree.places``."""
        tokens = positions.shape[1]
        makes = self._fuses(tokens, tree) or (self._by_flex and tokens <= MAX_QUERIES)
        return Layout(positions, slots, visible, None if makes else self._mask(positions, visible, tree), tree)

    def __call__(self, tokens: torch.Tensor, cache: StaticKVCache, layout: Layout) -> torch.Tensor:
        """Feeds ``tokens`` [B, q] int64 and stores their keys and values. Returns logits [B, q, V]."""
        if self._compiled is not None:
            return self._run(self._compiled, tokens, cache, layout)
        if self._records and not torch.is_grad_enabled():
            return self._replayed(tokens, cache, layout)
        return self._run(self._steps if layout.mask is None else self._prompts, tokens, cache, layout).logits

    def _replayed(self, tokens: torch.Tensor, cache: StaticKVCache, layout: Layout) -> torch.Tensor:
        """Does the same by a recording of an earlier call."""
        by_kind = isinstance(layout.mask, dict)
        masks: dict = layout.mask if isinstance(layout.mask, dict) else {} if layout.mask is None else {"": layout.mask}
        tree = layout.tree if self.recurrent else None  # others read its mask

        def forward(*inputs: torch.Tensor) -> torch.Tensor:
            tokens, positions, slots, cache.lengths, *others = inputs
            given = dict(zip(masks, others, strict=False))
            own = Layout(positions, slots, layout.visible, given if by_kind else given.get(""))
            own = own if tree is None else own._replace(tree=tree._replace(parents=others[-1]))
            return self._run(self._steps, tokens, cache, own).logits

        inputs = [tokens, layout.positions, layout.slots, cache.lengths, *masks.values()]
        if tree is not None and tree.parents is not None:
            inputs.append(tree.parents)
        # What sees slots by their numbers, and has no state, does not depend on how many there are.
        slots = () if self._attention == "native" and not self.recurrent else (layout.visible, cache.capacity)
        key = *(x.shape for x in inputs), *slots, tree is None, torch.is_autocast_enabled("cpu"), cache.form
        with self._threads():
            return self._recorded.run(key, cache, forward, *inputs, runs=1 if tokens.shape[1] == 1 else RARE_RUNS)

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
        size = len(sequences)
        if any(starts):  # a state cannot go back behind what it contains: such a text is read from its beginning
            committed = cache.committed()[first_row : first_row + size]
            starts = [start if start >= least else 0 for start, least in zip(starts, committed, strict=True)]
        new = [list(s[start:]) for s, start in zip(sequences, starts, strict=True)]
        lengths = torch.tensor([len(s) for s in sequences], dtype=torch.int64, device=self.device)
        cache.lengths = torch.cat((cache.lengths[:first_row], lengths, cache.lengths[first_row + size :]))
        first, failed, told = 0, False, list(starts)

        def feed(columns: int) -> int:
            nonlocal new, starts, first, failed
            if failed and cache.recurrent:  # some states contain these tokens already
                starts = [0 if own else start for own, start in zip(new, starts, strict=True)]
                new, first = [list(s[start:]) for s, start in zip(sequences, starts, strict=True)], 0
            failed = True
            fed = [n[first : first + columns] for n in new]
            positions = [start + first for start in starts]
            if on_logits is None:
                # Without the head, because logits of prompt x vocabulary would be the largest tensor of all.
                self._store(cache, fed, positions, first_row, self._prompts.base_model)
            else:
                logits = self._store(cache, fed, positions, first_row, self._prompts).logits
                for i, own in enumerate(fed):
                    known = max(told[i] - positions[i], 0)
                    if known < len(own):
                        on_logits(i, positions[i] + known, logits[i, known : len(own)])
                        told[i] = positions[i] + len(own)
            failed = False
            return first + columns

        most = max(LOGITS_TOKENS // max(size, 1), 1)
        while (left := max(map(len, new), default=0) - first) > 0:
            first = self.prefill_chunk.run(feed, left if on_logits is None else min(left, most), size)

    def _store(
        self, cache: StaticKVCache, fed: list[list[int]], starts: list[int], first_row: int, module: Callable[..., T]
    ) -> T:
        """Feeds ``module`` a chunk of each sequence. A second call for the same tokens writes the same slots, but takes
        them into a state twice."""
        longest = max(map(len, fed))
        tokens = torch.tensor([[*f, *[0] * (longest - len(f))] for f in fed], device=self.device)
        index = torch.arange(longest, device=self.device)
        valid = index < torch.tensor([len(f) for f in fed], device=self.device)[:, None]
        places = torch.tensor(starts, device=self.device)[:, None] + index
        slots = torch.where(valid, places, cache.trash)
        stored = max(start + len(f) for start, f in zip(starts, fed, strict=True) if f)
        positions, visible = places * valid, visible_slots(stored, cache.capacity)
        layout = Layout(positions, slots, visible, self._mask(positions, visible))
        return self._run(module, tokens, cache, layout, first_row, keep=True)

    def _take_attention(self) -> None:
        """Replaces the attention, and linear and recurrent layers, in a copy of the model. Looked at for every cache,
        because an adapter that was added in between has put other modules into the model, and a number of a module may
        have been changed."""
        modules = list(self.model.modules())
        weights = [x for m in modules for x in (*m._parameters.values(), *m._buffers.values()) if x is not None]
        inside = [*modules, *weights, *(x.dtype for x in weights)]
        numbers = numbers_in(modules)
        same = same_objects(inside, self._inside) and numbers == self._numbers
        if changed := not (same and is_merged_as_before(self._steps)):
            check_evaluating(self.model, self.name)
            self._inside, self._numbers = inside, numbers
        if self._compile:
            self._steps, self._compiled = compiled_copy(self.model, self.cache_dtype)
            self._prompts = self._steps
        elif changed:
            model = with_recurrence(self.model) if self.recurrent else self.model
            linear = with_native_linear(with_merged(with_attention(model, self._attention)))
            self._steps = with_native_layers(with_native_parts(linear, defers=self._attention == "fused"))
            move_to_huge_pages(read_whole(self.model))
            self._recorded = RecordedForwards(weights)
            self._prompts = with_merged(model) if self._attention in ("flex", "fused") else self._steps
        on_cpu = self.device.type == "cpu" and self._attention not in ("flex", "fused")
        self._records = on_cpu and not self._compile and is_recordable(self._steps)
        native = self._attention == "native" and is_native(self._steps)
        self._threads = native_threads if native else contextlib.nullcontext

    def _run(
        self,
        module: Callable[..., T],
        tokens: torch.Tensor,
        cache: StaticKVCache,
        layout: Layout,
        first_row: int = 0,
        keep: bool = False,
    ) -> T:
        makes = layout.mask is None and self._attention in ("flex", "fused")  # the mask, here
        fused = makes and self._fuses(layout.slots.shape[1], layout.tree)
        visible = cache.capacity if makes or self._attention == "native" else layout.visible
        cache.write_at(layout.slots, visible, first_row, keep, layout.tree, defers=fused)
        if self._lacks_tokens:
            tokens = tokens.clamp(max=self.num_embeddings - 1)
        inputs: dict[str, Any] = {"position_ids": layout.positions} if self._takes_positions else {}
        mask: object = self._padding_mask(layout, cache.trash) if self.needs_2d_mask else layout.mask
        if makes:
            queries = functools.partial(Queries, layout.positions, tree=layout.tree)
            made = seen_slots if fused else functools.partial(block_mask, capacity=cache.capacity)
            mask = self._by_kind(lambda window: made(queries(window)))
        if cache.features is not None:
            module = cache.features.recording(module, layout.slots, first_row)
        if self.recurrent:  # whose layers need no mask, as the cache says which tokens count
            mask = None if not self._takes_positions else {"full_attention": mask, **dict.fromkeys(_RECURRENT_LAYERS)}
        inputs[self._takes_cache_as] = cache
        with self._threads():
            return module(input_ids=tokens, attention_mask=mask, use_cache=True, **inputs)

    def _keys(self, visible: int) -> torch.Tensor:
        if visible not in self._key_index:
            self._key_index[visible] = torch.arange(visible, device=self.device)
        return self._key_index[visible]

    def _mask(self, positions: torch.Tensor, visible: int, tree: Tree | None = None) -> Mask | None:
        if self.needs_2d_mask:
            return None
        if self._attention == "native":
            return self._by_kind(lambda window: seen_slots(Queries(positions, window, tree)))
        keys = self._keys(visible)
        return self._by_kind(lambda window: self._as_model_wants(dense_mask(Queries(positions, window, tree), keys)))

    def _by_kind(self, mask: Callable[[int | None], T]) -> T | dict[str, T]:
        """Returns ``mask(window)`` for all layers, or one for each kind of layer if only some have a sliding
        window."""
        if not self._mixed_layers:
            return mask(self._window)
        return {"full_attention": mask(None), "sliding_attention": mask(self._window)}

    def _as_model_wants(self, mask: torch.Tensor) -> torch.Tensor:
        if not self._float_mask:
            return mask
        return torch.where(mask, self._zero, torch.finfo(self.dtype).min)

    def _padding_mask(self, layout: Layout, trash: int) -> torch.Tensor:
        """Returns [B, visible + q]: the stored slots before the first fed token, then the fed tokens (``append_new``).
        The model makes the mask causal itself, and takes ALiBi positions from its running sum."""
        stored = self._keys(layout.visible) < layout.positions[:, :1]
        return torch.cat((stored, layout.slots != trash), 1)
