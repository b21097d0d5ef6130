"""The operations that a forward calls, as they come."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from specdec_layers import native_form
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# By these, Python learns numbers, and may then call other operations for other numbers.
_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an argument or a result, which may be a list."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)
    elif isinstance(value, torch.Tensor):
        yield value


def memory_of(x: torch.Tensor) -> int:
    """What tensors have in common that share memory."""
    return x.untyped_storage()._cdata


class Reads(TorchFunctionMode):
    """Finds whether numbers are read that no operation reads."""

    found = False

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.found = self.found or function in _READS
        return function(*args, **(kwargs or {}))


class Call:
    """A call of an operation, and what it returned."""

    def __init__(self, operation: Any, args: Any, kwargs: Any, result: Any):
        self.operation, self.args, self.kwargs, self.result = operation, args, kwargs, result
        self.inputs, self.results = [*tensors([*args, *kwargs.values()])], [*tensors(result)]

    @functools.cached_property
    def is_view(self) -> bool:
        """Whether it made nothing new. (An operation such as reshape does or does not.)"""
        memory = set(map(memory_of, self.inputs))
        return self.operation.is_view and all(memory_of(x) in memory for x in self.results)

    @property
    def depends(self) -> bool:
        """Whether numbers decided what Python was told, or the shape of a result."""
        parts = self.result if isinstance(self.result, list | tuple) else [self.result]
        if any(isinstance(part, bool | int | float) for part in parts):
            return True
        if self.operation is torch.ops.aten.index.Tensor:  # by masks or numbers
            return any(x.dtype in (torch.bool, torch.uint8) for x in self.inputs[1:])
        return torch.Tag.dynamic_output_shape in self.operation.tags


class Calls(TorchDispatchMode):
    """Keeps all calls, with their tensors: so no tensor has the id of another. Those of PyTorch that an operation of
    our own can do are kept as calls of that."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Call] = []
        self.depend = False

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        self.made.append(call := Call(*native_form(operation, args, kwargs or {}), result))
        self.depend = self.depend or call.depends
        return result
