"""Forwards on a CPU, recorded as the operations that they call, and replayed without the modules around them.

The modules of a model call the same operations each time, with other numbers in the same shapes, and their Python takes
as long as a third of a step of a small model. A replay calls just the operations: what a CUDA graph is on a GPU. As
with graphs, all that is not an input, weights and caches among it, is used as the object that it was.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..exchanged.copied_modules import is_hooked
from ..exchanged.shards import has_shards
from .calls import Calls, Reads, memory_of
from .programs import Forward, Memory, Programs


class Cache(Protocol):
    def tensors(self) -> list[torch.Tensor]:
        """Returns all that it owns, in the same order as any cache of the same shape."""


class Recordings:
    """The recorded forwards of one model, by a key of all that a recording fixes, the shape of the cache among it. The
    first one with a key just runs, or the first ``runs``; the next is recorded, unless what it calls depends on
    numbers, or cannot be replayed. Later ones are replayed, over other caches, too.

    Args:
        weights: the model's parameters and buffers.
        most: recordings that are kept, the latest ones.

    Attributes:
        replays: how many there were.
        first_runs: how many forwards will take less time when they come again.
    """

    def __init__(self, weights: Sequence[torch.Tensor], most: int = 256):
        self.replays = self.first_runs = 0
        self._most = most
        self._weights = set(map(memory_of, weights))
        self._runs: Counter[Hashable] = Counter()
        self._known: dict[Hashable, Programs | None] = {}  # None: it runs each time
        self._bound: weakref.WeakKeyDictionary[Cache, dict[Hashable, Forward]] = weakref.WeakKeyDictionary()
        self._memory: weakref.WeakKeyDictionary[Cache, Memory] = weakref.WeakKeyDictionary()

    def run(self, key: Hashable, cache: Cache, forward: Forward, *inputs: torch.Tensor, runs: int = 1) -> torch.Tensor:
        """Returns ``forward(*inputs)``, which reads nothing else that is another tensor in the next call, but for the
        cache's own."""
        if torch.autograd.profiler._is_profiler_enabled or _get_current_dispatch_mode() is not None:
            return forward(*inputs)  # what looks at operations shall see every one, and none that makes a program
        bound = self._bound.setdefault(cache, {})
        if key not in bound:
            if key not in self._known:
                self.first_runs += 1
                self._runs[key] += 1
                if self._runs[key] <= runs:
                    return forward(*inputs)
                return self._record(key, cache, forward, inputs)
            recording = self._known[key]
            if recording is None:
                return forward(*inputs)
            self.first_runs += 1
            try:
                bound[key] = self._bind(recording, cache)
            except NotImplementedError:
                return self._record(key, cache, forward, inputs)
        self.replays += 1
        return bound[key](*inputs)

    def _bind(self, recording: Programs, cache: Cache) -> Forward:
        with _no_collection():
            return recording.bind(self._memory.setdefault(cache, Memory()), cache.tensors())

    def _record(self, key: Hashable, cache: Cache, forward: Forward, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        result, recording = record(forward, cache.tensors(), *inputs)
        try:
            replay = None if recording is None else self._bind(recording, cache)
        except NotImplementedError:
            replay = None
        if recording is None or replay is None:
            self._known[key] = None
            return result
        self._bound[cache][key] = replay
        # What is neither a weight nor the cache's may be of this cache, or of this text.
        if all(isinstance(x, nn.Parameter) or memory_of(x) in self._weights for x in recording.constants.values()):
            self._known[key] = recording
            if len(self._known) > self._most:
                oldest = next(iter(self._known))
                del self._known[oldest], self._runs[oldest]
                for bound in self._bound.values():
                    bound.pop(oldest, None)
        return result


def is_recordable(model: nn.Module) -> bool:
    """Whether nobody else's code may expect to run in every forward: hooks, or adapters, which can be switched. Other
    ranks, if the weights are shards, expect all of it."""
    modules = list(model.modules())
    if has_shards(model) or any(type(module).__module__.startswith("peft.") for module in modules):
        return False
    return not any(map(is_hooked, modules))


def record(
    forward: Forward, own: Sequence[torch.Tensor], *inputs: torch.Tensor
) -> tuple[torch.Tensor, Programs | None]:
    """Returns ``forward(*inputs)``, and what replays it with other tensors in place of ``own``. None: what is called
    would depend on the inputs' numbers, or no program can do it."""
    inputs = tuple(x.view(x.shape) for x in inputs)  # two inputs may be one tensor
    with _no_collection():
        with Reads() as reads, Calls() as calls:
            result = forward(*inputs)
        if reads.found or calls.depend:
            return result, None
        try:
            return result, Programs(calls.made, own, inputs, result)
        except NotImplementedError:
            return result, None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Thousands of objects are made and dropped here, for which Python would look for cycles among all that the process
    has, which takes longer than a recording."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
