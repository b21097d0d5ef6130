"""Compiles decoding forwards with ``torch.compile``: one graph for all lengths, or an error."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from transformers import PreTrainedModel

from ..cache.kv_cache import StaticKVCache, cache_argument
from ..exchanged.copied_modules import same_objects
from .attention import Mask


class NotCompiled(ValueError):
    """``compile`` was True for a model that torch.compile cannot compile as one graph."""


class CompiledForward:
    """A model's compiled forward over its static cache, in at most four graphs: for one sequence or several, with one
    token or several. The numbers of sequences and tokens, the cache's capacity and the visible slots are symbolic
    sizes, so nothing is compiled again while a text grows, nor for the next batch or cache. The model is not changed,
    and its weights are used as they are. A graph has the adapters that are active when it is made; other adapters get
    another graph.

    torch compiles again when its global state changes, which includes the number of threads.

    Args:
        model: as in :class:`~specdec.models.forward.cached_model.CachedModel`.
        backend: the backend of ``torch.compile``.
    """

    def __init__(self, model: PreTrainedModel, backend: str | Callable = "inductor"):
        called = cache_argument(model)

        def forward(cache: StaticKVCache, attention_mask: Mask, **inputs: torch.Tensor) -> torch.Tensor:
            cache.show(_tensors(attention_mask)[0], inputs["input_ids"].shape[1])
            return model(attention_mask=attention_mask, use_cache=True, **{called: cache}, **inputs).logits

        self._model, self._calls_cache = model, called
        # dynamo counts graphs by code object, so each model gets its own; torch 2.11 offers no other way.
        own = FunctionType(forward.__code__.replace(), globals(), forward.__name__, None, forward.__closure__)
        self._forward = own
        # With fullgraph, torch also raises beyond its limit of graphs, so the model never runs uncompiled.
        self._compiled = torch.compile(own, fullgraph=True, dynamic=None, backend=backend)
        self._prepared: weakref.WeakSet[StaticKVCache] = weakref.WeakSet()

    def __call__(self, attention_mask: Mask, use_cache: bool = True, **inputs: Any) -> torch.Tensor:
        """Returns logits [B, q, V]. Takes the model's inputs by its own names: tensors, and a ``StaticKVCache`` on
        which ``write_at`` was called.

        Raises:
            NotCompiled: names the model's type, and why it could not be compiled.
        """
        cache: StaticKVCache = inputs.pop(self._calls_cache)
        if cache not in self._prepared:
            if not cache.is_initialized:  # no prefill has run, all prompts were one token: run uncompiled first
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


@dataclass(frozen=True)
class _Copy:
    model: PreTrainedModel
    forward: CompiledForward
    inside: list[nn.Module]  # the original's modules, but not itself, since it may go while this is kept


# Of each model, by the dtype of its caches: a dtype takes graphs of its own, and dynamo keeps few of a function.
_COPIES: weakref.WeakKeyDictionary[PreTrainedModel, dict[torch.dtype | None, _Copy]] = weakref.WeakKeyDictionary()


def compiled_copy(model: PreTrainedModel, cache_dtype: torch.dtype | None) -> tuple[PreTrainedModel, CompiledForward]:
    """Returns a copy of ``model``, without which the graphs would keep it from being freed, and its compiled forward:
    the same ones each time, so that all decoders of a model share its graphs, until the model gets other modules, as
    with a new adapter."""
    inside = list(model.modules())[1:]
    copies = _COPIES.setdefault(model, {})
    known = copies.get(cache_dtype)
    if known is None or not same_objects(known.inside, inside):
        made = copy.copy(model)
        known = copies[cache_dtype] = _Copy(made, CompiledForward(made), inside)
    return known.model, known.forward


def _tensors(mask: Mask) -> tuple[torch.Tensor, ...]:
    # No generator: torch 2.15 does not trace one that is left before its end.
    return tuple(mask.values()) if isinstance(mask, dict) else (mask,)


def _mark(tensor: torch.Tensor, *dims: int) -> None:
    """Makes these sizes symbolic from the first graph on; size 1 always has its own graph. Each becomes a separate
    symbol: ``dynamic=True`` would treat sizes that happen to be equal as one symbol, so a batch of as many sequences
    as there are heads would be compiled for that number alone."""
    for dim in dims:
        if tensor.shape[dim] > 1:
            maybe_mark_dynamic(tensor, dim % tensor.dim())
