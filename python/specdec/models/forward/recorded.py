"""Forwards on a CPU, recorded as the operations that they call, and replayed without the modules around them.

The modules of a model call the same operations each time, with other numbers in the same shapes, and their Python takes
as long as a third of a step of a small model. A replay calls just the operations: what a CUDA graph is on a GPU. As
with graphs, all that is not an input, weights and caches among it, is used as the object that it was.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from types import CodeType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..exchanged.copied_modules import is_hooked
from ..exchanged.shards import has_shards
from .calls import Call, Calls, Reads, memory_of
from .programs import Memory, Programs

Forward = Callable[..., torch.Tensor]


class Recording(NamedTuple):
    # Of a cache's memory and its tensors: returns what calls the same operations, on inputs of the same shapes.
    # Raises NotImplementedError if other operations would be called over this cache.
    bind: Callable[[Memory, Sequence[torch.Tensor]], Forward]
    fixed: list[torch.Tensor]  # that it uses, and are no inputs and not the cache's
    is_program: bool


class Cache(Protocol):
    def tensors(self) -> list[torch.Tensor]:
        """Returns all that it owns, in the same order as any cache of the same shape."""


class Recordings:
    """The forwards of one model, by a key of all that a recording fixes, the shape of the cache among it. The first one
    with a key just runs, or the first ``runs``; the next is recorded, unless what it calls depends on numbers. Later
    ones are replayed, over other caches, too: as a native program if most of what is called is of our own, else as
    Python.

    Args:
        weights: the model's parameters and buffers.
        most: recordings that are kept, the latest ones.

    Attributes:
        replays: how many there were.
        programs: how many of them were native programs.
        first_runs: how many forwards will take less time when they come again.
    """

    def __init__(self, weights: Sequence[torch.Tensor], most: int = 256):
        self.replays = self.programs = self.first_runs = 0
        self._most = most
        self._weights = set(map(memory_of, weights))
        self._runs: Counter[Hashable] = Counter()
        self._known: dict[Hashable, Recording | None] = {}  # None: it runs each time
        self._bound: weakref.WeakKeyDictionary[Cache, dict[Hashable, _Replay]] = weakref.WeakKeyDictionary()
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
                bound[key] = self._replay(recording, cache)
            except NotImplementedError:
                return self._record(key, cache, forward, inputs)
        replay = bound[key]
        self.replays += 1
        self.programs += replay.is_program
        return replay.call(*inputs)

    def _replay(self, recording: Recording, cache: Cache) -> _Replay:
        memory = self._memory.setdefault(cache, Memory())
        return _Replay(recording.bind(memory, cache.tensors()), recording.is_program)

    def _record(self, key: Hashable, cache: Cache, forward: Forward, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        result, recording = record(forward, cache.tensors(), *inputs)
        try:
            replay = None if recording is None else self._replay(recording, cache)
        except NotImplementedError:
            replay = None
        if recording is None or replay is None:
            self._known[key] = None
            return result
        self._bound[cache][key] = replay
        # What is neither a weight nor the cache's may be of this cache, or of this text.
        if all(isinstance(x, nn.Parameter) or memory_of(x) in self._weights for x in recording.fixed):
            self._known[key] = recording
            if len(self._known) > self._most:
                oldest = next(iter(self._known))
                del self._known[oldest], self._runs[oldest]
                for bound in self._bound.values():
                    bound.pop(oldest, None)
        return result


class _Replay(NamedTuple):
    """A recording over one cache."""

    call: Forward
    is_program: bool


def is_recordable(model: nn.Module) -> bool:
    """Whether nobody else's code may expect to run in every forward: hooks, or adapters, which can be switched. Other
    ranks, if the weights are shards, expect all of it."""
    modules = list(model.modules())
    if has_shards(model) or any(type(module).__module__.startswith("peft.") for module in modules):
        return False
    return not any(map(is_hooked, modules))


def record(
    forward: Forward, own: Sequence[torch.Tensor], *inputs: torch.Tensor
) -> tuple[torch.Tensor, Recording | None]:
    """Returns ``forward(*inputs)``, and what replays it with other tensors in place of ``own``. None: what is called
    would depend on the inputs' numbers."""
    inputs = tuple(x.view(x.shape) for x in inputs)  # two inputs may be one tensor
    with Reads() as reads, Calls() as calls:
        result = forward(*inputs)
    if reads.found or calls.depend:
        return result, None
    fixed = _fixed(calls.made, own, inputs, result)
    try:
        return result, Recording(Programs(calls.made, own, inputs, result).bind, fixed, True)
    except NotImplementedError:
        code = _written(calls.made, own, inputs, result)
        return result, Recording(lambda _, own: code(*own), fixed, False)


def _fixed(
    calls: Sequence[Call], own: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], result: torch.Tensor
) -> list[torch.Tensor]:
    """Returns what is used that nothing made, and that is given by nobody."""
    known, fixed = set(map(id, (*own, *inputs))), list[torch.Tensor]()
    for used, made in (*((call.inputs, call.results) for call in calls), ([result], [])):
        fixed += {id(x): x for x in used if id(x) not in known}.values()
        known |= set(map(id, (*used, *made)))
    return fixed


def _written(
    calls: Sequence[Call], own: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], result: torch.Tensor
) -> Callable[..., Forward]:
    """Writes the calls as code, one a line, and returns what binds it to a cache's tensors. Parts of weights and
    caches, which stay where they are, are taken once. A value's name is used again when no later call needs the value,
    which frees its memory."""
    names: dict[int, str] = {}
    for i, x in enumerate(own):
        names.setdefault(id(x), f"k{i}")
    names |= {id(x): f"x{i}" for i, x in enumerate(inputs)}
    fixed: dict[str, Any] = {}
    by_value: dict[Hashable, str] = {}
    last = {id(x): i for i, call in enumerate(calls) for x in call.inputs} | {id(result): len(calls)}
    free: list[str] = []
    once, each = list[str](), list[str]()
    count = 0

    def constant(value: Any) -> str:
        key = id(value) if isinstance(value, torch.Tensor) else (type(value), str(value))
        if key not in by_value:
            by_value[key] = f"c{len(by_value)}"
            fixed[by_value[key]] = value
        return by_value[key]

    def written(value: Any) -> str:
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(written, value))}]"
        return names.get(id(value)) or constant(value)

    def changes(x: torch.Tensor) -> bool:
        return names.get(id(x), "c").startswith(("x", "v"))

    for i, call in enumerate(calls):
        given = {id(x) for x in call.inputs}
        made = [x for x in call.results if id(x) not in names and id(x) not in given]
        arguments = [*map(written, call.args), *(f"{name}={written(value)}" for name, value in call.kwargs.items())]
        line = f"{constant(call.operation._op)}({', '.join(arguments)})"
        stays = call.is_view and not any(map(changes, call.inputs))
        free += sorted({names[id(x)] for x in call.inputs if last[id(x)] == i and names.get(id(x), "").startswith("v")})
        for x in made:
            if stays:
                names[id(x)], count = f"p{count}", count + 1
            elif id(x) not in last:
                names[id(x)] = "_"
            elif free:
                names[id(x)] = free.pop()
            else:
                names[id(x)], count = f"v{count}", count + 1
        if made:
            targets = [names.get(id(x), "_") for x in _parts(call.result)]
            line = f"{targets[0] if isinstance(call.result, torch.Tensor) else ', '.join(targets) + ','} = {line}"
        (once if stays else each).append(line)
    lines = [
        f"def bind({', '.join(f'k{i}' for i in range(len(own)))}):",
        *(f" {line}" for line in once),
        f" def replay({', '.join(f'x{i}' for i in range(len(inputs)))}):",
        *(f"  {line}" for line in each),
        f"  return {written(result)}",
        " return replay",
    ]
    exec(_compiled("\n".join(lines)), fixed)
    return fixed["bind"]


def _parts(result: Any) -> Sequence[Any]:
    return [result] if isinstance(result, torch.Tensor) else result


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> CodeType:
    """The same forwards give the same source, as all that it names is given to it apart."""
    return compile(source, "<recorded forward>", "exec")
