"""Forwards on a CPU, recorded as the operations that they call, and replayed without the modules around them.

The modules of a model call the same operations each time, with other numbers in the same shapes, and their Python takes
as long as a third of a step of a small model. A replay calls just the operations: what a CUDA graph is on a GPU. As
with graphs, all that is not an input, weights and caches among it, is used as the object that it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Forward = Callable[..., torch.Tensor]
# By these, Python learns numbers, and may then call other operations for other numbers.
_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


class RecordedForwards:
    """The forwards over one cache, by a key of all that a recording fixes. The first one with a key just runs, as does
    each that cannot be recorded, because what it calls depends on numbers; the second is recorded, and later ones are
    replayed.

    Attributes:
        replays: how many there were.

    Args:
        most: recordings that are kept, the latest ones.
    """

    def __init__(self, most: int = 256) -> None:
        self.replays, self._most = 0, most
        self._known: dict[Hashable, Forward | None] = {}  # None: it runs each time
        self._seen: set[Hashable] = set()

    def run(self, key: Hashable, forward: Forward, *inputs: torch.Tensor) -> torch.Tensor:
        """Returns ``forward(*inputs)``, which reads nothing else that is another tensor in the next call."""
        if key not in self._known:
            if key not in self._seen:
                self._seen.add(key)
                return forward(*inputs)
            result, self._known[key] = record(forward, *inputs)
            if len(self._known) > self._most:
                self._seen.discard(oldest := next(iter(self._known)))
                del self._known[oldest]
            return result
        replay = self._known[key]
        if replay is None:
            return forward(*inputs)
        self.replays += 1
        return replay(*inputs)


def is_recordable(model: nn.Module) -> bool:
    """Whether nobody else's code may expect to run in every forward: hooks, or adapters, which can be switched."""
    modules = list(model.modules())
    if any(type(module).__module__.startswith("peft.") for module in modules):
        return False
    return not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def record(forward: Forward, *inputs: torch.Tensor) -> tuple[torch.Tensor, Forward | None]:
    """Returns ``forward(*inputs)``, and a function that calls the same operations for other inputs of the same shapes;
    None: they would depend on the inputs' numbers."""
    own = [x.view(x.shape) for x in inputs]  # two inputs may be one tensor
    with _Reads() as reads, _Calls() as calls:
        result = forward(*own)
    if reads.found or calls.depend:
        return result, None
    return result, _replay(calls.made, own, result)


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
        self.results = [result] if isinstance(result, torch.Tensor) else list(_tensors(result))

    @property
    def inputs(self) -> list[torch.Tensor]:
        return list(_tensors((self.args, list(self.kwargs.values()))))

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


def _replay(calls: Sequence[_Call], inputs: Sequence[torch.Tensor], result: torch.Tensor) -> Forward:
    """Returns a function whose code is the calls, one a line. A value's name is used again when no later call needs the
    value, which frees its memory."""
    names = {id(x): f"x{i}" for i, x in enumerate(inputs)}
    fixed: dict[str, Any] = {}
    by_value: dict[Hashable, str] = {}
    last = {id(x): i for i, call in enumerate(calls) for x in call.inputs} | {id(result): len(calls)}
    free: list[str] = []
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

    lines = [f"def replay({', '.join(names.values())}):"]
    for i, call in enumerate(calls):
        made = [x for x in call.results if id(x) not in names and id(x) not in map(id, call.inputs)]
        if made and call.is_view and not any(id(x) in names for x in call.inputs):
            continue  # a part of a weight or cache, which stays where it is
        arguments = [*map(written, call.args), *(f"{name}={written(value)}" for name, value in call.kwargs.items())]
        line = f"{constant(call.operation._op)}({', '.join(arguments)})"
        done = {names[id(x)] for x in call.inputs if id(x) in names and last[id(x)] == i}
        free += sorted(name for name in done if name.startswith("v"))
        for x in made:
            if id(x) not in last:
                names[id(x)] = "_"
            elif free:
                names[id(x)] = free.pop()
            else:
                names[id(x)], count = f"v{count}", count + 1
        if made:
            targets = [names.get(id(x), "_") for x in _parts(call.result)]
            line = f"{targets[0] if isinstance(call.result, torch.Tensor) else ', '.join(targets) + ','} = {line}"
        lines.append(f" {line}")
    lines.append(f" return {written(result)}")
    exec(_compiled("\n".join(lines)), fixed)
    return fixed["replay"]


def _parts(result: Any) -> Sequence[Any]:
    return [result] if isinstance(result, torch.Tensor) else result


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> CodeType:
    """Caches of the same model give the same source, as all that it names is given to it apart."""
    return compile(source, "<recorded forward>", "exec")
