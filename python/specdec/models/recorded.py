"""Forwards on a CPU, recorded as the operations that they call, and replayed without the modules around them.

The modules of a model call the same operations each time, with other numbers in the same shapes, and their Python takes
as long as a third of a step of a small model. A replay calls just the operations: what a CUDA graph is on a GPU. As
with graphs, all that is not an input, weights and caches among it, is used as the object that it was.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import CodeType
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Forward = Callable[..., torch.Tensor]
Bind = Callable[..., Forward]  # takes a cache's tensors
# By these, Python learns numbers, and may then call other operations for other numbers.
_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


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
    """

    def __init__(self, weights: Sequence[torch.Tensor], most: int = 256):
        self.replays, self._most = 0, most
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self._seen: set[Hashable] = set()
        self._known: dict[Hashable, Bind | None] = {}  # None: it runs each time
        self._bound: weakref.WeakKeyDictionary[Cache, dict[Hashable, Forward]] = weakref.WeakKeyDictionary()

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
            bind = self._known[key]
            if bind is None:
                return forward(*inputs)
            bound[key] = bind(*cache.tensors())
        self.replays += 1
        return bound[key](*inputs)

    def _record(self, key: Hashable, cache: Cache, forward: Forward, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        own = cache.tensors()
        result, recording = record(forward, own, *inputs)
        if recording is None:
            self._known[key] = None
            return result
        bind, fixed = recording
        self._bound[cache][key] = bind(*own)
        # What is neither a weight nor the cache's may be of this cache, or of this text.
        if all(isinstance(x, nn.Parameter) or x.untyped_storage()._cdata in self._weights for x in fixed):
            self._known[key] = bind
            if len(self._known) > self._most:
                oldest = next(iter(self._known))
                del self._known[oldest]
                self._seen.discard(oldest)
                for bound in self._bound.values():
                    bound.pop(oldest, None)
        return result


def is_recordable(model: nn.Module) -> bool:
    """Whether nobody else's code may expect to run in every forward: hooks, or adapters, which can be switched."""
    modules = list(model.modules())
    if any(type(module).__module__.startswith("peft.") for module in modules):
        return False
    return not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def record(
    forward: Forward, own: Sequence[torch.Tensor], *inputs: torch.Tensor
) -> tuple[torch.Tensor, tuple[Bind, list[torch.Tensor]] | None]:
    """Returns ``forward(*inputs)``, and what replays it: a function that takes tensors in place of ``own``, and returns
    one that takes inputs of the same shapes and calls the same operations; and the tensors that are neither, which it
    keeps. None: what is called would depend on the inputs' numbers."""
    inputs = tuple(x.view(x.shape) for x in inputs)  # two inputs may be one tensor
    with _Reads() as reads, _Calls() as calls:
        result = forward(*inputs)
    if reads.found or calls.depend:
        return result, None
    return result, _written(calls.made, own, inputs, result)


class _Reads(TorchFunctionMode):
    """Finds whether numbers are read that no operation reads."""

    found = False

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.found = self.found or function in _READS
        return function(*args, **(kwargs or {}))


class _Call:
    """A call of an operation, and what it returned."""

    def __init__(self, operation: Any, args: tuple, kwargs: dict, result: Any):
        self.operation, self.args, self.kwargs, self.result = operation, args, kwargs, result
        self.inputs, self.results = [*_tensors((args, [*kwargs.values()]))], [*_tensors(result)]

    @property
    def is_view(self) -> bool:
        """Whether it made nothing new. (An operation such as reshape does or does not.)"""
        memory = {x.untyped_storage()._cdata for x in self.inputs}
        return self.operation.is_view and all(x.untyped_storage()._cdata in memory for x in self.results)


class _Calls(TorchDispatchMode):
    """Keeps all calls, with their tensors: so no tensor has the id of another."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[_Call] = []
        self.depend = False

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        self.made.append(call := _Call(operation, args, kwargs or {}, result))
        self.depend = self.depend or _depends(call)
        return result


def _depends(call: _Call) -> bool:
    """Whether numbers decided what Python was told, or the shape of a result."""
    parts = call.result if isinstance(call.result, list | tuple) else [call.result]
    if any(isinstance(part, bool | int | float) for part in parts):
        return True
    if call.operation is torch.ops.aten.index.Tensor:  # by masks or numbers
        return any(x.dtype in (torch.bool, torch.uint8) for x in call.inputs[1:])
    return torch.Tag.dynamic_output_shape in call.operation.tags


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _written(
    calls: Sequence[_Call], own: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], result: torch.Tensor
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
