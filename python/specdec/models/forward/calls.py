"""The operations that a forward calls, as they come."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from specdec_layers import native_form
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# By these, Python learns numbers, and may then call other operations for other numbers.
_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


def tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in an argument or a result, which may be a list."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [x for part in value for x in tensors(part)]
    return []


def memory_of(x: torch.Tensor) -> int:
    """What tensors have in common that share memory."""
    return x.untyped_storage()._cdata


class Reads(TorchFunctionMode):
    """Finds whether numbers are read that no operation reads."""

    found = False

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.found = self.found or function in _READS
        return function(*args, **(kwargs or {}))


class _Kind(NamedTuple):
    """What is the same for all calls of an operation."""

    is_view: bool  # or not, as those of reshape
    indexes: bool  # by masks or numbers
    depends: bool  # whether the shape of what it returns depends on numbers


@functools.cache
def _kind(operation: Any) -> _Kind:
    depends = torch.Tag.dynamic_output_shape in operation.tags
    indexes = operation is torch.ops.aten.index.Tensor
    return _Kind(operation.is_view, indexes, depends and not indexes)


class Call:
    """A call of an operation, and what it returned."""

    __slots__ = "args", "input_memory", "inputs", "is_view", "kwargs", "operation", "result", "result_memory", "results"

    def __init__(self, operation: Any, args: Any, kwargs: Any, result: Any):
        self.operation, self.args, self.kwargs, self.result = operation, args, kwargs, result
        self.inputs, self.results = tensors([*args, *kwargs.values()]), tensors(result)
        self.input_memory, self.result_memory = [*map(memory_of, self.inputs)], [*map(memory_of, self.results)]
        # Whether it made nothing new.
        self.is_view = _kind(operation).is_view and all(memory in self.input_memory for memory in self.result_memory)

    @property
    def depends(self) -> bool:
        """Whether numbers decided what Python was told, or the shape of a result."""
        if not isinstance(self.result, torch.Tensor):
            parts = self.result if isinstance(self.result, list | tuple) else [self.result]
            if any(isinstance(part, bool | int | float) for part in parts):
                return True
        kind = _kind(self.operation)
        if kind.indexes:
            return any(x.dtype in (torch.bool, torch.uint8) for x in self.inputs[1:])
        return kind.depends


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
