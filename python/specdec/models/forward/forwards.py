"""Two ways to run a model's forward over its cache: its modules, and what they called, replayed."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from specdec_layers import native_threads
from transformers import PreTrainedModel

from ..cache.kv_cache import StaticKVCache, cache_argument
from ..exchanged.copied_modules import numbers_in, same_objects
from ..exchanged.decoder_layers import with_native_layers
from ..exchanged.elementwise import with_elementwise
from ..exchanged.huge_pages import move_to_huge_pages, read_whole
from ..exchanged.linear import is_native, with_native_linear
from ..exchanged.merged import is_merged_as_before, with_merged
from .attention import with_attention
from .layout import Layout
from .recorded import Recordings, is_recordable
from .recurrent import recurrent_layers, with_recurrence
from .step_attention import OwnAttention
from .training_mode import check_evaluating

T = TypeVar("T")
# Of a forward of several tokens, before it is recorded, since a short text has few steps of some widths: to record one
# takes as long as so many runs lose.
RARE_RUNS = 3
_RECURRENT_LAYERS = ("linear_attention", "conv")  # what models call them where masks are given by kind of layer


class Forwards:
    """Runs the modules each time, those of copies in which attention, linear, recurrent and other layers are exchanged.

    Args:
        model: is not changed.
        name: the model's name in errors.
        attention: of decoding forwards.
        largest_id: takes the place of ids beyond it, which the embedding does not have; None: it has all.

    Attributes:
        steps: the copy of the model whose modules a decoding forward runs.
        prompts: the copy for prompts, and for decoding forwards whose layout has a mask. Its base model is without the
            head.
        recurrent: the numbers of the layers that have a state.
        takes_positions: whether the model is told positions.
        is_recorded: whether decoding forwards are recorded and replayed, where they can be.
    """

    is_recorded = False

    def __init__(self, model: PreTrainedModel, name: str, attention: OwnAttention, largest_id: int | None = None):
        self.model, self.attention = model, attention
        self.steps = self.prompts = model
        self.recurrent = frozenset(recurrent_layers(model))
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._name, self._largest_id, self._calls_cache = name, largest_id, cache_argument(model)
        self._threads: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._inside: list[object] = []
        self._numbers: tuple[object, ...] = ()

    @property
    def first_runs(self) -> int:
        """How many forwards on a CPU took longer than they will when they come again."""
        return 0

    def renew(self) -> None:
        """Makes the copies, anew if an adapter that was added in between has put other modules into the model, or a
        number of a module was changed. Called before the first forward, and for every cache.

        Raises:
            ValueError: names the model, if a module of it is in training mode.
        """
        modules = list(self.model.modules())
        weights = [x for m in modules for x in (*m._parameters.values(), *m._buffers.values()) if x is not None]
        inside = [*modules, *weights, *(x.dtype for x in weights)]
        numbers = numbers_in(modules)
        if same_objects(inside, self._inside) and numbers == self._numbers and is_merged_as_before(self.steps):
            return
        check_evaluating(self.model, self._name)
        self._inside, self._numbers = inside, numbers
        self._copy(weights)

    def _copy(self, weights: Sequence[torch.Tensor]) -> None:
        model = with_recurrence(self.model) if self.recurrent else self.model
        linear = with_native_linear(with_merged(with_attention(model, self.attention.name)))
        self.steps = with_native_layers(with_elementwise(linear, defers=self.attention.defers))
        move_to_huge_pages(read_whole(self.model))
        self.prompts = with_merged(model) if self.attention.only_steps else self.steps
        native = self.attention.is_native and is_native(self.steps)
        self._threads = native_threads if native else contextlib.nullcontext

    def step(self, tokens: torch.Tensor, cache: StaticKVCache, layout: Layout) -> torch.Tensor:
        """Returns the logits [B, q, V] of a decoding forward of ``tokens`` [B, q] int64."""
        return self.run(self.steps if layout.mask is None else self.prompts, tokens, cache, layout).logits

    def prepare(self, tokens: torch.Tensor, cache: StaticKVCache, layout: Layout) -> bool:
        """Makes later decoding forwards like this one, which feeds ``tokens``, as fast as they will be, where the first
        ones take longer. Returns whether they do."""
        return False

    def run(
        self,
        module: Callable[..., T],
        tokens: torch.Tensor,
        cache: StaticKVCache,
        layout: Layout,
        first_row: int = 0,
        keep: bool = False,
    ) -> T:
        """Feeds ``tokens`` [n, q] int64 to one of the modules, and stores their keys and values in the n rows from
        ``first_row`` on. Returns what the module does.

        Args:
            keep: they are never rolled back, as those of a prompt.
        """
        mask, visible, defers = self.attention.given(layout, cache)
        cache.write_at(layout.slots, visible, first_row, keep, layout.tree, defers)
        if self._largest_id is not None:
            tokens = tokens.clamp(max=self._largest_id)
        dropped = cache.dropped
        positions = layout.positions if dropped is None else dropped.positions(layout.positions, first_row)
        inputs: dict[str, Any] = {"position_ids": positions} if self.takes_positions else {}
        if cache.features is not None:
            module = cache.features.recording(module, layout.slots, first_row)
        if self.recurrent:  # whose layers need no mask, as the cache says which tokens count
            mask = None if not self.takes_positions else {"full_attention": mask, **dict.fromkeys(_RECURRENT_LAYERS)}
        inputs[self._calls_cache] = cache
        with self._threads():
            return module(input_ids=tokens, attention_mask=mask, use_cache=True, **inputs)


class RecordedForwards(Forwards):
    """Decoding forwards on a CPU are recorded as the operations that they call, and replayed where the same shape comes
    again."""

    recordings: Recordings

    @property
    def first_runs(self) -> int:
        return self.recordings.first_runs if self.is_recorded else 0

    def renew(self) -> None:
        super().renew()
        self.is_recorded = is_recordable(self.steps)

    def _copy(self, weights: Sequence[torch.Tensor]) -> None:
        super()._copy(weights)
        self.recordings = Recordings(weights)

    def step(self, tokens: torch.Tensor, cache: StaticKVCache, layout: Layout) -> torch.Tensor:
        if not self.is_recorded or torch.is_grad_enabled():
            return super().step(tokens, cache, layout)
        return self._recorded(tokens, cache, layout, runs=1 if tokens.shape[1] == 1 else RARE_RUNS)

    def prepare(self, tokens: torch.Tensor, cache: StaticKVCache, layout: Layout) -> bool:
        if self.is_recorded and not torch.is_grad_enabled():
            self._recorded(tokens, cache, layout, runs=0)
        return self.is_recorded

    def _recorded(self, tokens: torch.Tensor, cache: StaticKVCache, layout: Layout, runs: int) -> torch.Tensor:
        by_kind = isinstance(layout.mask, dict)
        masks: dict = layout.mask if isinstance(layout.mask, dict) else {} if layout.mask is None else {"": layout.mask}
        tree = layout.tree if self.recurrent else None  # others read its mask

        def forward(*inputs: torch.Tensor) -> torch.Tensor:
            tokens, positions, slots, cache.lengths, *others = inputs
            given = dict(zip(masks, others, strict=False))
            own = Layout(positions, slots, layout.visible, given if by_kind else given.get(""))
            own = own if tree is None else own._replace(tree=tree._replace(parents=others[-1]))
            return self.run(self.steps, tokens, cache, own).logits

        inputs = [tokens, layout.positions, layout.slots, cache.lengths, *masks.values()]
        if tree is not None and tree.parents is not None:
            inputs.append(tree.parents)
        # What sees slots by their numbers, and has no state, does not depend on how many there are.
        slots = () if self.attention.reads_only_filled and not self.recurrent else (layout.visible, cache.capacity)
        key = *(x.shape for x in inputs), *slots, tree is None, torch.is_autocast_enabled("cpu"), cache.form
        with self._threads():
            return self.recordings.run(key, cache, forward, *inputs, runs=runs)
