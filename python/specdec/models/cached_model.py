"""Drives one Hugging Face model over its static cache: which slot, position and mask every fed token gets."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .attention import MAX_QUERIES, Queries, block_mask, choose, configurations, using
from .compiled import CompiledForward
from .kv_cache import StaticKVCache, visible_slots
from .memory import PrefillChunk, stored_slots

T = TypeVar("T")
Mask = torch.Tensor | dict[str, torch.Tensor]
FLEX_STEP = 256  # slots

PREFILL_TOKENS = 8192  # of one forward at most: what it computes in between is freed before the next


class Layout(NamedTuple):
    """Where the q tokens of one or several forwards stand, sequence by sequence. Cut by column, so that a
    step computes it once for all its forwards.

    Padding (short prompts, drafts that do not count, finished sequences) has position 0, which every model
    has, and the trash slot, which no query sees.
    """

    positions: torch.Tensor  # [B, q] int64
    slots: torch.Tensor  # [B, q] int64, equal to positions but for padding
    visible: int  # slots that attention reads
    mask: Mask | None  # [B, 1, q, visible], or one for each kind of layer; None where it is made in the forward

    def split(self, sizes: list[int]) -> list[Layout]:
        """Consecutive layouts of so many columns each."""
        if isinstance(self.mask, dict):
            by_kind = [m.split(sizes, 2) for m in self.mask.values()]
            masks = [dict(zip(self.mask, parts, strict=True)) for parts in zip(*by_kind, strict=True)]
        else:
            masks = [None] * len(sizes) if self.mask is None else self.mask.split(sizes, 2)
        cut = zip(self.positions.split(sizes, 1), self.slots.split(sizes, 1), masks, strict=True)
        return [Layout(positions, slots, self.visible, mask) for positions, slots, mask in cut]


def _max_length(config: PreTrainedConfig) -> int | None:
    """How many positions the model has, as far as they are independent of each other.

    Dynamic and long RoPE change all frequencies once a forward reaches past the original length: a draft there, or
    another sequence of the batch, would change tokens that come before it.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]  # the latter: MPT
    for r in by_layer_type:
        if r.get("rope_type") in ("dynamic", "longrope"):
            limits.append(r.get("original_max_position_embeddings"))
    return min((n for n in limits if n is not None), default=None)


def _computing_dtype(model: PreTrainedModel) -> torch.dtype:
    """Of the hidden states: that of the first parameters, quantised ones (integers, 8-bit floats) left out."""
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point() and p.itemsize > 1)
    return next(dtypes, None) or model.config.dtype or torch.get_default_dtype()


class CachedModel:
    """A causal LM with explicit positions, slots and masks. Holds no state of a generation: that is the
    cache's.

    Args:
        model: a decoder-only ``PreTrainedModel`` (``specdec.models.supported`` says which), in evaluation mode.
        name: for errors.
        attention: "auto", "model", "flex" or "grouped" (``attention.choose``). Flex is for steps: prompts are then
            read with the model's own.

    Attributes:
        cache_dtype: that of its caches, where keys and values are to be rounded; None: as they come.
        prefill_chunk: tokens of one forward of a prefill at most, padding included.
    """

    def __init__(self, model: PreTrainedModel, name: str = "model", attention: str = "auto"):
        self.model, self.name = model, name
        self.cache_dtype: torch.dtype | None = None
        self.prefill_chunk = PrefillChunk(PREFILL_TOKENS)
        self.config = model.config.get_text_config(decoder=True)
        self.device, self.dtype = model.device, _computing_dtype(model)
        self.vocab_size: int = self.config.vocab_size
        # The weights of quantised layers have shapes of their own.
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        self.num_embeddings: int = getattr(table, "num_embeddings", None) or table.weight.shape[0]
        self.num_outputs: int = getattr(head, "out_features", None) or head.weight.shape[0]
        self.may_lack_tokens = False  # then its last one is fed in the place of those
        self.max_length = _max_length(self.config)
        # ALiBi is built from a 2-D mask (Bloom, some Falcons): these models reject a 4-D one.
        self.needs_2d_mask = self.config.model_type == "bloom" or bool(getattr(self.config, "alibi", False))
        # Eager attention adds its mask to the scores; on a CPU others do, too, and would convert a boolean one in
        # every layer.
        self._float_mask = self.config._attn_implementation == "eager" or self.device.type == "cpu"
        self._window = getattr(self.config, "sliding_window", None)
        layer_types = set(getattr(self.config, "layer_types", None) or ())
        self._mixed_layers = "sliding_attention" in layer_types and len(layer_types) > 1
        if layer_types == {"full_attention"}:
            self._window = None
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._key_index: dict[int, torch.Tensor] = {}  # by length; kept, as captured steps read them
        self._attention, self._configs = choose(model, attention), configurations(model)
        self._compiled: CompiledForward | None = None

    @property
    def reads_only_filled(self) -> bool:
        """Whether a step reads what sequences have stored, whatever ``visible`` says. Narrower keys are not read but
        converted before, all that are visible."""
        return self._attention == "flex" and self.cache_dtype in (None, self.dtype)

    @property
    def slot_step(self) -> int:
        """Capacities that vary are multiples of so many slots: few different numbers where attention is compiled for
        each."""
        return FLEX_STEP if self.reads_only_filled else 1

    def capacity(self, tokens: int) -> int:
        """Slots for sequences of up to so many tokens, the trash slot included."""
        return -(-(tokens + 1) // self.slot_step) * self.slot_step

    def compiled(self) -> CachedModel:
        """The same, with logits through ``torch.compile`` and the model's own attention; prompts are stored by the
        model as it is: each has a length of its own, and runs once."""
        own = copy.copy(self)
        own._compiled, own._attention = CompiledForward(self.model), "model"
        return own

    def new_cache(self, batch_size: int, capacity: int) -> StaticKVCache:
        """All of it allocated.

        Raises:
            ValueError: as ``specdec.models.memory.stored_slots``.
        """
        slots = stored_slots(self)
        append_new = self.needs_2d_mask
        cache = StaticKVCache(self.config, batch_size, capacity, self.device, append_new, self.cache_dtype)
        cache.allocate(slots)
        return cache

    def layout(self, positions: torch.Tensor, slots: torch.Tensor, visible: int) -> Layout:
        """The layout of tokens at ``positions`` [B, q] int64 stored in ``slots`` [B, q] int64 (``visible`` as
        from ``visible_slots``), with the masks that this model wants."""
        by_flex = self.reads_only_filled and positions.shape[1] <= MAX_QUERIES
        return Layout(positions, slots, visible, None if by_flex else self._mask(positions, visible))

    def __call__(self, tokens: torch.Tensor, cache: StaticKVCache, layout: Layout) -> torch.Tensor:
        """Feeds ``tokens`` [B, q] int64 and stores their keys. Returns logits [B, q, V]."""
        if self._compiled is not None:
            return self._run(self._compiled, tokens, cache, layout)
        return self._run(self.model, tokens, cache, layout).logits

    def prefill(self, cache: StaticKVCache, sequences: Sequence[Sequence[int]]) -> None:
        """Stores the keys of whole sequences of token ids from slot 0 on, and sets ``cache.lengths``. No logits."""
        self.extend(cache, sequences, [0] * len(sequences))

    def extend(
        self, cache: StaticKVCache, sequences: Sequence[Sequence[int]], starts: Sequence[int], first_row: int = 0
    ) -> None:
        """As ``prefill``, for sequences whose first ``starts`` tokens are stored already, in the rows from
        ``first_row`` on. In chunks of columns: smaller ones from then on where memory runs out, with a warning."""
        size = len(sequences)
        new = [list(s[start:]) for s, start in zip(sequences, starts, strict=True)]
        lengths = torch.tensor([len(s) for s in sequences], dtype=torch.int64, device=self.device)
        cache.lengths = torch.cat((cache.lengths[:first_row], lengths, cache.lengths[first_row + size :]))
        longest = max(map(len, new), default=0)
        first = 0

        def feed(columns: int) -> int:
            fed = [n[first : first + columns] for n in new]
            self._store(cache, fed, [start + first for start in starts], first_row)
            return first + columns

        while first < longest:
            first = self.prefill_chunk.run(feed, longest - first, size)

    def _store(self, cache: StaticKVCache, fed: list[list[int]], starts: list[int], first_row: int) -> None:
        """Called again for the same tokens, it writes the same slots."""
        longest = max(map(len, fed))
        tokens = torch.tensor([[*f, *[0] * (longest - len(f))] for f in fed], device=self.device)
        index = torch.arange(longest, device=self.device)
        valid = index < torch.tensor([len(f) for f in fed], device=self.device)[:, None]
        places = torch.tensor(starts, device=self.device)[:, None] + index
        slots = torch.where(valid, places, cache.trash)
        stored = max(start + len(f) for start, f in zip(starts, fed, strict=True) if f)
        positions, visible = places * valid, visible_slots(stored, cache.capacity)
        layout = Layout(positions, slots, visible, self._mask(positions, visible))
        # The model without its head: prompt x vocabulary logits would be the largest tensor of all.
        self._run(self.model.base_model, tokens, cache, layout, first_row)

    def _run(
        self,
        module: Callable[..., T],
        tokens: torch.Tensor,
        cache: StaticKVCache,
        layout: Layout,
        first_row: int = 0,
    ) -> T:
        by_flex = self.reads_only_filled and layout.mask is None
        cache.write_at(layout.slots, cache.capacity if by_flex else layout.visible, first_row)
        if self.may_lack_tokens:
            tokens = tokens.clamp(max=self.num_embeddings - 1)
        inputs = {"position_ids": layout.positions} if self._takes_positions else {}
        mask = self._padding_mask(layout, cache.trash) if self.needs_2d_mask else layout.mask
        if by_flex:
            mask = self._by_kind(lambda window: block_mask(Queries(layout.positions, window), cache.capacity))
        masked = "model" if self._attention == "flex" else self._attention
        with using("flex" if by_flex else masked, self._configs):
            return module(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True, **inputs)

    def _keys(self, visible: int) -> torch.Tensor:
        if visible not in self._key_index:
            self._key_index[visible] = torch.arange(visible, device=self.device)
        return self._key_index[visible]

    def _mask(self, positions: torch.Tensor, visible: int) -> Mask | None:
        """True = attend. The window rule is masking_utils.sliding_window_overlay: key > query - window."""
        if self.needs_2d_mask:
            return None
        keys, queries = self._keys(visible), positions[:, None, :, None]
        causal = keys <= queries
        return self._by_kind(
            lambda window: self._as_model_wants(causal if window is None else causal & (keys > queries - window))
        )

    def _by_kind(self, mask: Callable[[int | None], T]) -> T | dict[str, T]:
        """``mask`` of the window of all layers, or of each kind of layer where some slide."""
        if not self._mixed_layers:
            return mask(self._window)
        return {"full_attention": mask(None), "sliding_attention": mask(self._window)}

    def _as_model_wants(self, mask: torch.Tensor) -> torch.Tensor:
        if not self._float_mask:
            return mask
        return torch.where(mask, 0.0, torch.finfo(self.dtype).min).to(self.dtype)

    def _padding_mask(self, layout: Layout, trash: int) -> torch.Tensor:
        """[B, visible + q]: the stored slots before the first fed token, then the fed tokens
        (``append_new``). The model itself makes it causal, and ALiBi positions are its running sum."""
        stored = self._keys(layout.visible) < layout.positions[:, :1]
        return torch.cat((stored, layout.slots != trash), 1)
