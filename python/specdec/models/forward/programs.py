"""Replays of forwards: calls on memory that stays where it is, with little Python between them.

In Python, a call takes some microseconds, and a step has a thousand. Here all that they make gets a place for each
cache, once. Views are then made once, too, and operations of our own run as native programs, without Python between
them. PyTorch's run between these, and what they return is copied to its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from specdec_layers import Program

from .calls import Call, memory_of, tensors

Forward = Callable[..., torch.Tensor]


class Memory:
    """Blocks of bytes, for the values of one forward at a time over a cache: none is needed when it is over. Within it,
    a block serves other values when no later call needs what it has."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[torch.Tensor]] = {}
        self._free: dict[int, list[torch.Tensor]] = {}

    def begin(self) -> None:
        self._free = {size: [*blocks] for size, blocks in self._blocks.items()}

    def take(self, count: int) -> torch.Tensor:
        size = 1 << max(count - 1, 63).bit_length()
        if self._free.get(size):
            return self._free[size].pop()
        block = torch.empty(size, dtype=torch.uint8)
        self._blocks.setdefault(size, []).append(block)
        return block

    def give(self, block: torch.Tensor) -> None:
        self._free.setdefault(block.numel(), []).append(block)


@dataclass(frozen=True)
class _Place:
    """Stands, among the arguments of a call, for a tensor that is no constant."""

    number: int
    shape: torch.Size


class _Made(NamedTuple):
    """A value that a call returns, and how it lies in its memory."""

    number: int
    memory: int
    bytes: int
    dtype: torch.dtype
    layout: tuple[Sequence[int], Sequence[int], int | torch.SymInt]  # shape, strides, offset

    @property
    def overlaps(self) -> bool:
        """Whether several of its numbers are in one place."""
        return any(size > 1 and stride == 0 for size, stride in zip(*self.layout[:2], strict=True))

    def over(self, block: torch.Tensor) -> torch.Tensor:
        return block.view(self.dtype).as_strided(*self.layout)


class _Step(NamedTuple):
    operation: Any
    arguments: Any  # args and kwargs, with places
    made: dict[int, _Made]  # by their index in what it returns
    is_view: bool
    is_kept: bool  # by a program
    last: list[int]  # memory that no later step needs


class Programs:
    """What a recording does, in a form that :meth:`bind` makes programs of.

    Args:
        calls, own, inputs, result: as recorded. None of these tensors is kept but weights and other constants.

    Raises:
        NotImplementedError: why it cannot be replayed.
    """

    def __init__(
        self, calls: Sequence[Call], own: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], result: torch.Tensor
    ):
        numbers: dict[int, int] = {}
        for x in (*own, *inputs):
            numbers.setdefault(id(x), len(numbers))

        def made(x: torch.Tensor) -> _Made:
            stored, layout = x.untyped_storage(), (x.shape, x.stride(), x.storage_offset())
            return _Made(numbers.setdefault(id(x), len(numbers)), stored._cdata, stored.nbytes(), x.dtype, layout)

        def place(x: torch.Tensor) -> Any:
            return _Place(numbers[id(x)], x.shape) if id(x) in numbers else x

        self._own = [numbers[id(x)] for x in own]
        # Each has memory of its own, as inputs that share some need not do so the next time.
        forms = [torch.empty_like(x, device="meta") for x in inputs]
        self._inputs = [
            made(x)._replace(bytes=y.nbytes, layout=(y.shape, y.stride(), 0))
            for x, y in zip(inputs, forms, strict=True)
        ]
        while calls and calls[-1].is_view:
            calls = calls[:-1]
        last = {memory_of(x): i for i, call in enumerate(calls) for x in (*call.inputs, *call.results)}
        seen, given = set(map(memory_of, (*own, *inputs))), set(map(memory_of, inputs))
        self._steps = list[_Step]()
        for i, call in enumerate(calls):
            arguments, before = _exchanged((call.args, call.kwargs), torch.Tensor, place), set(map(id, call.inputs))
            new = {n: made(x) for n, x in enumerate(call.results) if id(x) not in numbers and id(x) not in before}
            if not call.is_view and any(x.memory in seen or x.overlaps for x in new.values()):
                raise NotImplementedError(f"{call.operation} returns memory that something else has, too")
            if any(memory_of(x) in given for x in call.results if id(x) in before):
                raise NotImplementedError(f"{call.operation} changes an input")
            if call.operation is torch.ops.aten.as_strided.default and memory_of(call.inputs[0]) in given:
                raise NotImplementedError(f"{call.operation} looks into an input's memory")
            seen |= {memory_of(x) for x in (*call.inputs, *call.results)}
            ends = {memory_of(x) for x in (*call.inputs, *call.results) if last[memory_of(x)] == i}
            kept = Program.keeps(call.operation)
            self._steps.append(_Step(call.operation, arguments, new, call.is_view, kept, sorted(ends)))
        makes = [] if not calls else [n for n, x in self._steps[-1].made.items() if x.memory == memory_of(result)]
        if not makes:
            raise NotImplementedError("the last call does not make the result")
        self._head, self._result = self._steps.pop(), (makes[0], made(result).layout)

    @torch.inference_mode(False)
    @torch.no_grad()
    def bind(self, memory: Memory, own: Sequence[torch.Tensor]) -> Forward:
        """Returns what replays it over a cache with these tensors, which are not read or written yet.

        Raises:
            NotImplementedError: a shape, or what is a view, depends on the cache.
        """
        values = dict(zip(self._own, own, strict=True))
        blocks: dict[int, torch.Tensor] = {}
        memory.begin()

        def place(x: _Made) -> torch.Tensor:
            if x.memory not in blocks:
                blocks[x.memory] = memory.take(x.bytes)
            values[x.number] = x.over(blocks[x.memory])
            return values[x.number]

        inputs = [x.over(memory.take(x.bytes)) for x in self._inputs]
        values.update(zip((x.number for x in self._inputs), inputs, strict=True))
        runs = list[Callable[[], None]]()
        program: Program | None = None
        for step in self._steps:
            operation, arguments, made, is_view, is_kept, last = step
            args, kwargs = _exchanged(arguments, _Place, lambda x: values[x.number])
            if is_view:
                with torch.inference_mode():  # in which weights may have been made; of others it makes usual views
                    views, base = [*tensors(operation._op(*args, **kwargs))], memory_of(args[0])
                values.update({x.number: views[n] for n, x in made.items()})
                if any(memory_of(values[x.number]) != base for x in made.values()):
                    raise NotImplementedError(f"{operation} makes no view over this cache")
            elif is_kept:
                if program is None:
                    program = Program()
                    runs.append(program.run)
                program.keep(operation, args, kwargs, results=[place(x) for x in made.values()])
            else:
                if made:
                    _check_shapes(step, values)
                program = None
                results = {n: place(x) for n, x in made.items()}
                runs.append(functools.partial(_copied, operation._op, args, kwargs, results))
            for ended in last:
                if ended in blocks:
                    memory.give(blocks.pop(ended))
        _check_shapes(self._head, values)
        args, kwargs = _exchanged(self._head.arguments, _Place, lambda x: values[x.number])
        head, (index, layout) = self._head.operation._op, self._result

        def replay(*given: torch.Tensor) -> torch.Tensor:
            for x, new in zip(inputs, given, strict=True):
                x.copy_(new)
            for run in runs:
                run()
            return [*tensors(head(*args, **kwargs))][index].as_strided(*layout)

        return replay


def _exchanged(value: Any, kind: type, other: Callable[[Any], Any]) -> Any:
    """Returns an argument with ``other`` of each part that is of this kind."""
    if isinstance(value, list | tuple):
        return [_exchanged(part, kind, other) for part in value]
    if isinstance(value, dict):
        return {name: _exchanged(part, kind, other) for name, part in value.items()}
    return other(value) if isinstance(value, kind) else value


def _check_shapes(step: _Step, values: dict[int, torch.Tensor]) -> None:
    """What PyTorch returns has the shape that it had if what it is given has."""

    def check(x: _Place) -> None:
        if values[x.number].shape != x.shape:
            raise NotImplementedError(f"{step.operation} is given other shapes over this cache")

    _exchanged(step.arguments, _Place, check)


def _copied(operation: Any, args: Any, kwargs: Any, results: dict[int, torch.Tensor]) -> None:
    returned = [*tensors(operation(*args, **kwargs))]
    for index, place in results.items():
        place.copy_(returned[index])
