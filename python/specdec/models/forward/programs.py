"""Replays of forwards: calls on memory that stays where it is, with little Python between them.

In Python, a call takes some microseconds, and a step has a thousand. Here all that they make gets a place for each
cache, once. Views are then made once, too, and operations of our own run as native programs, without Python between
them. PyTorch's run between these, and what they return is copied to its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from specdec_layers import Program

from .calls import Call, memory_of, tensors

Forward = Callable[..., torch.Tensor]


class Memory:
    """Blocks of numbers, for the values of one forward at a time over a cache: none is needed when it is over. Within
    it, a block serves other values when no later call needs what it has."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        self._free: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}

    def begin(self) -> None:
        self._free = {kind: [*blocks] for kind, blocks in self._blocks.items()}

    def take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        kind = dtype, 1 << max(count - 1, 15).bit_length()
        if self._free.get(kind):
            return self._free[kind].pop()
        with torch.inference_mode(False):  # whatever the mode is in which a replay writes to it
            block = torch.empty(kind[1], dtype=dtype)
        self._blocks.setdefault(kind, []).append(block)
        return block

    def give(self, block: torch.Tensor) -> None:
        self._free.setdefault((block.dtype, block.numel()), []).append(block)


class _Arguments:
    """What a call is given, with holes where tensors stood that are no constants."""

    __slots__ = "_names", "holes", "parts"

    def __init__(self, call: Call, numbers: Mapping[int, int], constants: dict[int, torch.Tensor]):
        self.parts, self._names = [*call.args, *call.kwargs.values()], tuple(call.kwargs)
        self.holes: list[tuple[int, int | None, int, torch.Size]] = []  # part, place in its list, number, shape
        seen = 0
        for i, part in enumerate(self.parts):
            if isinstance(part, torch.Tensor):
                among: list[tuple[int | None, torch.Tensor]] = [(None, part)]
            elif isinstance(part, list | tuple):
                among = [(j, x) for j, x in enumerate(part) if isinstance(x, torch.Tensor)]
            else:
                continue
            seen += len(among)
            for j, x in among:
                if (number := numbers.get(id(x))) is None:
                    constants[id(x)] = x
                    continue
                self.holes.append((i, j, number, x.shape))
                if j is None:
                    self.parts[i] = None
                else:
                    self.parts[i] = [*self.parts[i][:j], None, *self.parts[i][j + 1 :]]
        if seen < len(call.inputs):
            raise NotImplementedError(f"{call.operation} is given lists of lists of tensors")

    def filled(self, values: Mapping[int, torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        parts = [*self.parts]
        for i, j, number, _ in self.holes:
            if j is None:
                parts[i] = values[number]
            else:
                parts[i] = [*parts[i][:j], values[number], *parts[i][j + 1 :]]
        count = len(parts) - len(self._names)
        return parts[:count], dict(zip(self._names, parts[count:], strict=True))

    def check(self, operation: Any, values: Mapping[int, torch.Tensor]) -> None:
        """What PyTorch returns has the shape that it had if these have the shapes that were recorded."""
        if any(values[number].shape != shape for _, _, number, shape in self.holes):
            raise NotImplementedError(f"{operation} is given other shapes over this cache")


class _Made(NamedTuple):
    """A value that a call returns, and how it lies in its memory."""

    number: int
    memory: int
    room: int  # of its memory, for so many numbers
    dtype: torch.dtype
    layout: tuple[Sequence[int], Sequence[int], int | torch.SymInt]  # shape, strides, offset

    @property
    def overlaps(self) -> bool:
        """Whether several of its numbers are in one place."""
        return any(size > 1 and stride == 0 for size, stride in zip(*self.layout[:2], strict=True))


class _Step(NamedTuple):
    operation: Any
    arguments: _Arguments
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
        numbers, self.constants = dict[int, int](), dict[int, torch.Tensor]()
        for x in (*own, *inputs):
            numbers.setdefault(id(x), len(numbers))

        def made(x: torch.Tensor, number: int, memory: int) -> _Made:
            layout = x.shape, x.stride(), x.storage_offset()
            return _Made(number, memory, x.untyped_storage().nbytes() // x.itemsize, x.dtype, layout)

        self._own = [numbers[id(x)] for x in own]
        # Each has memory of its own, as inputs that share some need not do so the next time.
        self._inputs = [made(torch.empty_like(x), numbers[id(x)], -1 - i) for i, x in enumerate(inputs)]
        while calls and calls[-1].is_view:
            calls = calls[:-1]
        last = {memory: i for i, call in enumerate(calls) for memory in (*call.input_memory, *call.result_memory)}
        given = set(map(memory_of, inputs))
        seen = given.union(map(memory_of, own))
        self._steps = list[_Step]()
        for i, call in enumerate(calls):
            operation, before = call.operation, set(map(id, call.inputs))
            arguments = _Arguments(call, numbers, self.constants)
            new = dict[int, _Made]()
            for n, (x, memory) in enumerate(zip(call.results, call.result_memory, strict=True)):
                if id(x) in before:
                    if memory in given:
                        raise NotImplementedError(f"{operation} changes an input")
                elif id(x) not in numbers:
                    numbers[id(x)] = len(numbers)
                    new[n] = made(x, numbers[id(x)], memory)
            shared = len({x.memory for x in new.values()}) < len(new)
            if not call.is_view and (shared or any(x.memory in seen or x.overlaps for x in new.values())):
                raise NotImplementedError(f"{operation} returns memory that something else has, too")
            if operation is torch.ops.aten.as_strided.default and call.input_memory[0] in given:
                raise NotImplementedError(f"{operation} looks into an input's memory")
            used = {*call.input_memory, *call.result_memory}
            seen |= used
            ends = sorted(memory for memory in used if last[memory] == i)
            self._steps.append(_Step(operation, arguments, new, call.is_view, Program.keeps(operation), ends))
        memory = memory_of(result)
        makes = [] if not calls else [n for n, x in self._steps[-1].made.items() if x.memory == memory]
        if not makes:
            raise NotImplementedError("the last call does not make the result")
        self._head, self._index = self._steps.pop(), makes[0]
        self._layout = result.shape, result.stride(), result.storage_offset()

    @torch.inference_mode()  # in which weights may have been made; of others it makes usual views
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
                blocks[x.memory] = memory.take(x.dtype, x.room)
            values[x.number] = blocks[x.memory].as_strided(*x.layout)
            return values[x.number]

        inputs = [*map(place, self._inputs)]
        blocks.clear()
        runs = list[Callable[[], None]]()
        program: Program | None = None
        for operation, arguments, made, is_view, is_kept, last in self._steps:
            args, kwargs = arguments.filled(values)
            if is_view:
                views, base = tensors(operation._op(*args, **kwargs)), memory_of(args[0])
                for n, x in made.items():
                    values[x.number] = view = views[n]
                    if memory_of(view) != base:
                        raise NotImplementedError(f"{operation} makes no view over this cache")
            elif is_kept:
                if program is None:
                    program = Program()
                    runs.append(program.run)
                program.keep(operation, args, kwargs, results=[place(x) for x in made.values()])
            else:
                if made:
                    arguments.check(operation, values)
                program = None
                results = {n: place(x) for n, x in made.items()}
                runs.append(functools.partial(_copied, operation._op, args, kwargs, results))
            for ended in last:
                if ended in blocks:
                    memory.give(blocks.pop(ended))
        self._head.arguments.check(self._head.operation, values)
        args, kwargs = self._head.arguments.filled(values)
        head, index, layout = self._head.operation._op, self._index, self._layout

        def replay(*given: torch.Tensor) -> torch.Tensor:
            for x, new in zip(inputs, given, strict=True):
                x.copy_(new)
            for run in runs:
                run()
            return tensors(head(*args, **kwargs))[index].as_strided(*layout)

        return replay


def _copied(operation: Any, args: Any, kwargs: Any, results: dict[int, torch.Tensor]) -> None:
    returned = tensors(operation(*args, **kwargs))
    for index, place in results.items():
        place.copy_(returned[index])
