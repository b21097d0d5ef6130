"""Forwards on a CPU, recorded as the operations that they call, and replayed without the modules around them.

The modules of a model call the same operations each time, with other numbers in the same shapes, and their Python takes
as long as a third of a step of a small model. A replay calls just the operations: what a CUDA graph is on a GPU. As
with graphs, all that is not an input, weights and caches among it, is used as the object that it was.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from types import CodeType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .calls import Call, Calls, Reads, memory_of
from .programs import Memory, Programs
from .shards import has_shards

Forward = Callable[..., torch.Tensor]
Bind = Callable[..., Forward]  # takes a cache's tensors
_FIRST = 2  # replays over a cache in Python


class Recording(NamedTuple):
    bind: Bind  # returns what calls the same operations, on inputs of the same shapes
    fixed: list[torch.Tensor]  # that it uses, and are no inputs and not the cache's
    programs: Programs | None  # None: it has none


class Cache(Protocol):
    def tensors(self) -> list[torch.Tensor]:
        """Returns all that it owns, in the same order as any cache of the same shape."""


class RecordedForwards:
    """The forwards of one model, by a key of all that a recording fixes, the shape of the cache among it. The first one
    with a key just runs, as does each that cannot be recorded, because what it calls depends on numbers; the second is
    recorded, and later ones are replayed, over other caches, too.

    Args:
        weights: the model's parameters and buffers.
        most: recordings that are kept, the latest ones.

    Attributes:
        replays: how many there were.
        programs: how many of them were native programs.
    """

    def __init__(self, weights: Sequence[torch.Tensor], most: int = 256):
        self.replays = self.programs = 0
        self._most = most
        self._weights = set(map(memory_of, weights))
        self._seen: set[Hashable] = set()
        self._known: dict[Hashable, Recording | None] = {}  # None: it runs each time
        self._bound: weakref.WeakKeyDictionary[Cache, dict[Hashable, _Replay]] = weakref.WeakKeyDictionary()
        self._memory: weakref.WeakKeyDictionary[Cache, Memory] = weakref.WeakKeyDictionary()

    def run(self, key: Hashable, cache: Cache, forward: Forward, *inputs: torch.Tensor) -> torch.Tensor:
        """Returns ``forward(*inputs)``, which reads nothing else that is another tensor in the next call, but for the
        cache's own."""
        bound = self._bound.setdefault(cache, {})
        if key not in bound:
            if key not in self._known:
                if key not in self._seen:
                    self._seen.add(key)
                    return forward(*inputs)
                return self._record(key, cache, forward, inputs)
            recording = self._known[key]
            if recording is None:
                return forward(*inputs)
            bound[key] = self._replay(recording, cache)
        self.replays += 1
        replay = bound[key]
        result = replay(*inputs)
        self.programs += replay.was_program
        return result

    def _replay(self, recording: Recording, cache: Cache) -> _Replay:
        return _Replay(recording, cache.tensors(), self._memory.setdefault(cache, Memory()))

    def _record(self, key: Hashable, cache: Cache, forward: Forward, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        result, recording = record(forward, cache.tensors(), *inputs)
        if recording is None:
            self._known[key] = None
            return result
        self._bound[cache][key] = self._replay(recording, cache)
        # What is neither a weight nor the cache's may be of this cache, or of this text.
        if all(isinstance(x, nn.Parameter) or memory_of(x) in self._weights for x in recording.fixed):
            self._known[key] = recording
            if len(self._known) > self._most:
                oldest = next(iter(self._known))
                del self._known[oldest]
                self._seen.discard(oldest)
                for bound in self._bound.values():
                    bound.pop(oldest, None)
        return result


class _Replay:
    """A recording over one cache. To make a program takes as long as a few replays in Python, which come first."""

    def __init__(self, recording: Recording, own: Sequence[torch.Tensor], memory: Memory):
        self.was_program, self._left, self._called = False, _FIRST, recording.bind(*own)
        self._program: Forward | None = None
        self._bind = None if recording.programs is None else functools.partial(recording.programs.bind, memory, own)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        # A profiler, or what else looks at operations, shall see every one, and none that makes a program.
        watched = torch.autograd.profiler._is_profiler_enabled or _get_current_dispatch_mode() is not None
        if self._left > 0:
            self._left -= 1
        elif self._bind is not None and not watched:
            with contextlib.suppress(NotImplementedError):
                self._program = self._bind()
            self._bind = None
        program = None if watched else self._program
        self.was_program = program is not None
        return self._called(*inputs) if program is None else program(*inputs)


def is_recordable(model: nn.Module) -> bool:
    """Whether nobody else's code may expect to run in every forward: hooks, or adapters, which can be switched. Other
    ranks, if the weights are shards, expect all of it."""
    modules = list(model.modules())
    if has_shards(model) or any(type(module).__module__.startswith("peft.") for module in modules):
        return False
    return not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


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
    programs: Programs | None
    try:
        programs = Programs(calls.made, own, inputs, result)
    except NotImplementedError:
        programs = None
    return result, Recording(*_written(calls.made, own, inputs, result), programs)


def _written(
    calls: Sequence[Call], own: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], result: torch.Tensor
) -> tuple[Bind, list[torch.Tensor]]:
    """Writes the calls as code, one a line. Parts of weights and caches, which stay where they are, are taken once. A
    value's name is used again when no later call needs the value, which frees its memory."""
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
    return fixed["bind"], [x for x in fixed.values() if isinstance(x, torch.Tensor)]


def _parts(result: Any) -> Sequence[Any]:
    return [result] if isinstance(result, torch.Tensor) else result


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> CodeType:
    """The same forwards give the same source, as all that it names is given to it apart."""
    return compile(source, "<recorded forward>", "exec")
