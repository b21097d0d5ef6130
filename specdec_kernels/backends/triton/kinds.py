"""Calls of one kind, whose launches are found once.

In every launch, Triton looks at each argument for what its kernels are compiled for: types, which pointers and integers
are multiples of 16, and which integers are 1. It compares the constants of the module, too. That takes most of a call's
time on the host, and making the arguments takes much of the rest. But what an argument of ours is depends on the
tensors that the call was given: on their dtypes, shapes, strides and alignments, which are its kind. So the first call
of a kind launches as Triton does, and the later ones launch the same kernels on the same arguments, but for addresses,
which take the place of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
import triton

from . import tables

MOST_KINDS = 4096  # that are remembered: those of a server whose batches have any size, with every number of drafts
ALIGNMENT = 16


class Kind:
    """What all calls of a kind launch.

    A call has a list of parts, of which arguments are made: the addresses of what it was given and of its results, and
    then ``parts``, with which it begins, and where scratch and tuples have their places.
    """

    def __init__(self) -> None:
        self.parts: list[object] = []
        self.scratch: list[tuple[int, int]] = []  # places, and where it is in the memory of a call
        self.bytes = ALIGNMENT  # of this memory, which is allocated at once, to begin at a multiple
        self.tuples: list[tuple[int, Callable[[list], tuple]]] = []  # places, and tuples of parts before them
        # What Triton compiled, grid, arguments; and the first one's launcher and function, with its metadata.
        self.launches: list[tuple[Any, tuple[int, int, int], Callable[[list], tuple], Callable, tuple]] = []

    def launch(self, addresses: list[int | None], device: torch.device) -> None:
        """Launches what the first call launched, on other addresses."""
        parts: list = addresses + self.parts
        memory = torch.empty(
            self.bytes, dtype=torch.uint8, device=device
        )  # nobody else's until all kernels are launched
        first = -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT
        for place, offset in self.scratch:
            parts[place] = first + offset
        for place, gathered in self.tuples:
            parts[place] = gathered(parts)
        stream, hooks = current_stream(), triton.knobs.runtime
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            for compiled, grid, gathered, *_ in self.launches:
                compiled[grid](*gathered(parts), stream=stream)
        else:  # the same, but that Triton would describe each launch to hooks
            for _, grid, gathered, run, function in self.launches:
                run(*grid, stream, *function, None, None, None, *gathered(parts))


def current_stream() -> int:
    driver = triton.runtime.driver.active
    return driver.get_current_stream(driver.get_current_device())


class FirstCall:
    """The first call of a kind, which launches on tensors, and notes what later ones launch. In Triton's interpreter,
    which compiles no kernels, every call is one.

    Args:
        tensors: what the call was given, and its results, in the order of later calls' addresses.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None], device: torch.device):
        self.device, self.kind = device, Kind()
        # What was given twice is two objects here, since a later call may be given two tensors.
        self.tensors = [None if t is None else t.detach() for t in tensors]
        self._parts: list[object] = [*self.tensors]  # held, as long as their ids stand for them
        self._places = {id(t): place for place, t in enumerate(self.tensors) if t is not None}

    def allocate(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Scratch, which holds no result. It is part of one allocation in later calls."""
        tensor, kind = torch.empty(shape, dtype=dtype, device=self.device), self.kind
        kind.scratch.append((self._add(tensor, None), kind.bytes - ALIGNMENT))
        kind.bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return tensor

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], *arguments: object, table: bool = False, **constants: object
    ) -> None:
        """Launches ``kernel`` with these arguments and constants. ``table``: as in ``tables.options``."""
        compiled = kernel[grid](*arguments, **constants, **tables.options(kernel.__name__, self.device, table))
        if compiled is not None:
            # A compiled kernel takes its constants as well, and does not look at them.
            unread = (None,) * (len(kernel.arg_names) - len(arguments))
            gathered, function = self._gathered((*arguments, *unread)), (compiled.function, compiled.packed_metadata)
            self.kind.launches.append((compiled, grid, gathered, compiled.run, function))

    def _gathered(self, given: tuple) -> Callable[[list], tuple]:
        """What makes such a tuple of a later call's parts."""
        places = [self._place(part) for part in given]
        return itemgetter(*places) if len(places) > 1 else lambda parts: tuple([parts[place] for place in places])

    def _place(self, part: object) -> int:
        if (place := self._places.get(id(part))) is not None:
            return place
        if isinstance(part, torch.Tensor):
            raise LookupError("an argument of a kernel is neither given nor a result nor scratch")
        if not isinstance(part, tuple):
            return self._add(part, part)
        gathered = self._gathered(part)
        self.kind.tuples.append((place := self._add(part, None), gathered))
        return place

    def _add(self, part: object, later: object) -> int:
        """The place of a new part, where later calls begin with ``later``."""
        place = self._places[id(part)] = len(self._parts)
        self._parts.append(part)
        self.kind.parts.append(later)
        return place


_kinds: dict[Hashable, Kind] = {}


def known(form: Hashable) -> Kind | None:
    """The kind of calls of this form, which says of a call whatever its launches depend on; None: there was none."""
    return _kinds.get(form)


def remember(form: Hashable, kind: Kind) -> None:
    if kind.launches:
        if len(_kinds) >= MOST_KINDS:
            _kinds.clear()
        _kinds[form] = kind


@contextmanager
def using(kernel: str, num_warps: int) -> Iterator[None]:
    """Launches ``kernel`` with another number of warps than the table's, to time it."""
    tables.overrides[kernel] = num_warps
    _kinds.clear()
    try:
        yield
    finally:
        del tables.overrides[kernel]
        _kinds.clear()
