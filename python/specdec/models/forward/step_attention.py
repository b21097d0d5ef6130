"""What a forward has to know of its attention, a class for each kind: which slots are read, which mask says what is
seen, and who makes it, the layout or the forward itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar, cast

import torch
from specdec_layers import MOST_ATTENDING, bytes_beside_caches
from transformers import PreTrainedModel

from ..cache.kv_cache import StaticKVCache
from ..cache.kv_layer import LayerSlot
from ..cache.tree import Tree
from ..exchanged.stored_weights import computing_dtype
from .attention import MAX_QUERIES, Mask, Queries, block_mask, can_be_fused, dense_mask, seen_slots
from .attention_choice import has_sinks
from .layout import Layout

T = TypeVar("T")
FLEX_STEP = 256  # slots


class Given(NamedTuple):
    """What a forward is given."""

    mask: Any  # as the model takes it, or one for each kind of layer
    visible: int  # slots that attention reads
    defers: bool = False  # attention stores keys and values itself


class OwnAttention:
    """The model's own attention, over a mask of the visible slots.

    Args:
        model: whose attention it is.
        cache_dtype: as in :class:`~specdec.models.forward.cached_model.CachedModel`.

    Attributes:
        name: "model", "flex", "native" or "fused", as ``attention_choice.choose`` says it.
        reads_only_filled: whether a step reads only the stored slots, whatever ``visible`` and the capacity are.
        slot_step: capacities should be multiples of this many slots.
        is_native: whether it is the kernel of our own for CPUs, which reads keys and values as they are stored.
        only_steps: whether it is for decoding forwards, and prompts are read with the model's own.
        defers: whether layers leave rotations and new keys for it to compute.
        append_new: whether it reads the stored slots followed by the new keys, and not these in their slots.
    """

    name = "model"
    reads_only_filled = is_native = only_steps = defers = append_new = False
    slot_step = 1

    def __init__(self, model: PreTrainedModel, cache_dtype: torch.dtype | None):
        self.config = config = model.config.get_text_config(decoder=True)
        self.device, self.dtype, self.cache_dtype = model.device, computing_dtype(model), cache_dtype
        # Keys in a narrower dtype are all converted, as far as they are visible, before they are read.
        self.reads_stored = cache_dtype in (None, self.dtype)
        # Eager attention adds its mask to the scores. On a CPU the others do so as well, and would convert a boolean
        # mask in every layer.
        self._adds_mask = config._attn_implementation == "eager" or self.device.type == "cpu"
        self._zero = torch.zeros((), dtype=self.dtype, device=self.device)  # masks of two numbers would be float32
        self._window = getattr(config, "sliding_window", None)
        layer_types = set(getattr(config, "layer_types", None) or ())
        self._mixed_layers = "sliding_attention" in layer_types and len(layer_types) > 1
        if layer_types and "sliding_attention" not in layer_types:
            self._window = None
        self._key_index: dict[int, torch.Tensor] = {}  # by length; kept because captured steps read them

    @property
    def slides(self) -> bool:
        """Whether some layer of the model has a sliding window."""
        return self._window is not None

    def layout(self, positions: torch.Tensor, slots: torch.Tensor, visible: int, tree: Tree | None = None) -> Layout:
        """Returns the layout of a decoding forward, with the mask unless the forward makes it."""
        makes = self.forward_makes_mask(positions.shape[1], tree)
        return Layout(positions, slots, visible, None if makes else self.mask(positions, visible, tree), tree)

    def forward_makes_mask(self, tokens: int, tree: Tree | None) -> bool:
        """Whether a forward of so many tokens of a sequence makes its mask itself, from the layout."""
        return False

    def mask(self, positions: torch.Tensor, visible: int, tree: Tree | None = None) -> Mask | None:
        """Returns the mask of a layout, as the model's own attention takes it; None: it is made in the forward."""
        keys = self._keys(visible)
        return self._by_kind(lambda window: self._added(dense_mask(Queries(positions, window, tree), keys)))

    def given(self, layout: Layout, cache: StaticKVCache) -> Given:
        """Returns what a forward with this layout is given."""
        return Given(layout.mask, layout.visible)

    def bytes_beside_caches(self, layers: Collection[LayerSlot], rows: int, slots: int, tokens: int) -> int:
        """Returns the most bytes that it takes for a while; see ``CachedModel.bytes_beside_caches``."""
        return 0

    def _keys(self, visible: int) -> torch.Tensor:
        if visible not in self._key_index:
            self._key_index[visible] = torch.arange(visible, device=self.device)
        return self._key_index[visible]

    def _added(self, mask: torch.Tensor) -> torch.Tensor:
        if not self._adds_mask:
            return mask
        return torch.where(mask, self._zero, torch.finfo(self.dtype).min)

    def _by_kind(self, mask: Callable[[int | None], T]) -> T | dict[str, T]:
        """Returns ``mask(window)`` for all layers, or one for each kind of layer if only some have a sliding
        window."""
        if not self._mixed_layers:
            return mask(self._window)
        return {"full_attention": mask(None), "sliding_attention": mask(self._window)}


class AlibiAttention(OwnAttention):
    """The model's own attention with ALiBi (Bloom, some Falcons), whose model takes a 2-D mask and rejects a 4-D
    one."""

    append_new = True

    def mask(self, positions: torch.Tensor, visible: int, tree: Tree | None = None) -> Mask | None:
        return None

    def given(self, layout: Layout, cache: StaticKVCache) -> Given:
        """The mask is [B, visible + q]: the stored slots before the first fed token, then the fed tokens
        (``append_new``). The model makes it causal itself, and takes ALiBi positions from its running sum."""
        stored = self._keys(layout.visible) < layout.positions[:, :1]
        return Given(torch.cat((stored, layout.slots != cache.trash), 1), layout.visible)


class NativeAttention(OwnAttention):
    """The kernel of our own for CPUs, which reads the slots that each query sees, by their numbers."""

    name, reads_only_filled, is_native = "native", True, True

    def mask(self, positions: torch.Tensor, visible: int, tree: Tree | None = None) -> Mask | None:
        return self._by_kind(lambda window: seen_slots(Queries(positions, window, tree)))

    def given(self, layout: Layout, cache: StaticKVCache) -> Given:
        return Given(layout.mask, cache.capacity)


class FlexAttention(OwnAttention):
    """PyTorch's FlexAttention, compiled for each capacity; the model's own for many tokens, and where it has sinks."""

    name, only_steps = "flex", True

    def __init__(self, model: PreTrainedModel, cache_dtype: torch.dtype | None):
        super().__init__(model, cache_dtype)
        self.reads_only_filled = self.reads_stored and not has_sinks(model)
        self.slot_step = FLEX_STEP if self.reads_only_filled else 1

    def forward_makes_mask(self, tokens: int, tree: Tree | None) -> bool:
        return self.reads_only_filled and tokens <= MAX_QUERIES

    def given(self, layout: Layout, cache: StaticKVCache) -> Given:
        if layout.mask is not None:
            return super().given(layout, cache)
        return Given(self._made(layout, functools.partial(block_mask, capacity=cache.capacity)), cache.capacity)

    def _made(self, layout: Layout, make: Callable[[Queries], T]) -> T | dict[str, T]:
        return self._by_kind(lambda window: make(Queries(layout.positions, window, layout.tree)))


class FusedAttention(FlexAttention):
    """The kernel of our own for GPUs, which stores keys and values and attends, of few tokens; of more, flex
    attention."""

    name, defers = "fused", True

    def fuses(self, tokens: int, tree: Tree | None) -> bool:
        """Whether one kernel stores so many tokens of a sequence and attends to them, in a layer."""
        return self.reads_stored and can_be_fused(tokens, tree)

    def forward_makes_mask(self, tokens: int, tree: Tree | None) -> bool:
        return self.fuses(tokens, tree) or super().forward_makes_mask(tokens, tree)

    def given(self, layout: Layout, cache: StaticKVCache) -> Given:
        if layout.mask is not None or not self.fuses(layout.slots.shape[1], layout.tree):
            return super().given(layout, cache)
        return Given(self._made(layout, seen_slots), cache.capacity, defers=True)

    def bytes_beside_caches(self, layers: Collection[LayerSlot], rows: int, slots: int, tokens: int) -> int:
        heads = self.config.num_attention_heads
        group = max(heads // (getattr(self.config, "num_key_value_heads", None) or heads), 1)
        sizes = {(keys.heads, values.size) for pair in layers if pair is not None for keys, values in [pair]}
        counts = rows, min(tokens, MOST_ATTENDING)
        return max((bytes_beside_caches(*counts, n, group, slots, size, self.dtype) for n, size in sizes), default=0)


_KINDS = {kind.name: kind for kind in (OwnAttention, NativeAttention, FlexAttention, FusedAttention)}


def step_attention(name: str, model: PreTrainedModel, cache_dtype: torch.dtype | None) -> OwnAttention:
    """Returns the attention that ``attention_choice.choose`` calls by this name; the other arguments are
    :class:`OwnAttention`'s."""
    config = model.config.get_text_config(decoder=True)
    alibi = config.model_type == "bloom" or bool(getattr(config, "alibi", False))
    kind = AlibiAttention if alibi else _KINDS[name]
    return cast(OwnAttention, kind(model, cache_dtype))
