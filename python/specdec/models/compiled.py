"""Decoding forwards through ``torch.compile``: one graph for all lengths, or an error."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import FunctionType

import torch
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from transformers import PreTrainedModel

from .attention import Mask
from .kv_cache import StaticKVCache


class NotCompiled(ValueError):
    """``compile``: got True for a model that torch.compile cannot take as a whole."""


class CompiledForward:
    """A model's forward over its static cache, in at most four graphs: for one sequence or several, of one token or
    several. How many of them, the cache's capacity and the slots that attention sees are symbols, so nothing is
    compiled again while a text grows, nor for the next batch or cache. Weights are the model's own, which is not
    changed; adapters are those that are active when a graph is made, and others make another.

    torch compiles again where its global state changes, of which the number of threads is a part.

    Args:
        model: as in :class:`~specdec.models.cached_model.CachedModel`.
        backend: of ``torch.compile``.
    """

    def __init__(self, model: PreTrainedModel, backend: str | Callable = "inductor"):
        def forward(past_key_values: StaticKVCache, attention_mask: Mask, **inputs: torch.Tensor) -> torch.Tensor:
            # From a shape, which may be a symbol: an attribute would be a constant of the graph.
            mask = next(_tensors(attention_mask))
            past_key_values.show(mask.shape[-1] - (inputs["input_ids"].shape[1] if mask.dim() == 2 else 0))
            return model(
                attention_mask=attention_mask, past_key_values=past_key_values, use_cache=True, **inputs
            ).logits

        self._model = model
        # dynamo counts graphs by code object, and torch 2.11 has no other way to count those of each model.
        own = FunctionType(forward.__code__.replace(), globals(), forward.__name__, None, forward.__closure__)
        self._forward = own
        # Beyond its limit of graphs, fullgraph raises as well: the model never runs uncompiled.
        self._compiled = torch.compile(own, fullgraph=True, dynamic=None, backend=backend)
        self._prepared: weakref.WeakSet[StaticKVCache] = weakref.WeakSet()

    def __call__(
        self, past_key_values: StaticKVCache, attention_mask: Mask, use_cache: bool = True, **inputs: torch.Tensor
    ) -> torch.Tensor:
        """Logits [B, q, V]. The model's inputs by name, and a cache, which is used, that knows where their keys go.

        Raises:
            NotCompiled: names the model's type, and why it could not be compiled.
        """
        cache = past_key_values
        if cache not in self._prepared:
            if not cache.is_initialized:  # every prompt was one token: this forward twice, the first time as it is
                self._forward(cache, attention_mask, **inputs)
            for stored in cache.storage():
                _mark(stored, 0, 2)
            self._prepared.add(cache)
        for rows in cache.index_rows():
            _mark(rows, 0)
        for mask in _tensors(attention_mask):
            _mark(mask, 0, -2, -1)
        for states in inputs.values():
            _mark(states, 0, 1)
        try:
            return self._compiled(cache, attention_mask, **inputs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            kind, reason = self._model.config.model_type, (str(error).splitlines() or [""])[0]
            raise NotCompiled(
                f"compile: got True for model type {kind!r}, allowed: models that torch.compile takes as one graph "
                f"({type(error).__name__}: {reason})"
            ) from error


def _tensors(mask: Mask) -> Iterator[torch.Tensor]:
    yield from mask.values() if isinstance(mask, dict) else (mask,)


def _mark(tensor: torch.Tensor, *dims: int) -> None:
    """These sizes are symbols from the first graph on; 1 is always a graph of its own. Each is a symbol for itself:
    with ``dynamic=True`` sizes that happen to be equal are taken for one, so a batch of as many sequences as there are
    heads would be compiled for that number alone."""
    for dim in dims:
        if tensor.shape[dim] > 1:
            maybe_mark_dynamic(tensor, dim % tensor.dim())
