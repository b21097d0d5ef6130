"""Calls of one kind, whose kernels Triton looks up once.

In every launch, Triton looks at each argument for what its kernels are compiled for: types, which pointers and integers
are multiples of 16, and which integers are 1. It compares the constants of the module, too. That takes most of a call's
time on the host. But what an argument of ours is depends on the tensors that the call was given: on their dtypes,
shapes, strides and alignments, which are its kind. So the first call of a kind launches as Triton does, and the later
ones launch what it returned, on addresses in place of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from . import tables

MOST_KINDS = 4096  # that are remembered: those of a server whose batches have any size, with every number of drafts
ALIGNMENT = 16

Piece = tuple[torch.dtype, tuple[int, ...]] | None


class Scratch:
    """Memory of a call that holds none of its results, as one allocation: a tensor for each piece (dtype, shape) that
    is wanted, or None."""

    def __init__(self, *pieces: Piece):
        self.pieces: list[tuple[int, int, torch.dtype, tuple[int, ...]] | None] = []
        self.size = ALIGNMENT  # to begin at a multiple
        for piece in pieces:
            if piece is None:
                self.pieces.append(None)
                continue
            dtype, shape = piece
            size = math.prod(shape) * dtype.itemsize
            self.pieces.append((self.size - ALIGNMENT, size, dtype, shape))
            self.size += -(-size // ALIGNMENT) * ALIGNMENT

    def addresses(self, memory: torch.Tensor) -> list[int | None]:
        """Where the pieces are in ``memory`` [size] uint8."""
        first = -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT
        return [None if piece is None else first + piece[0] for piece in self.pieces]

    def tensors(self, memory: torch.Tensor) -> list[torch.Tensor | None]:
        memory = memory[-memory.data_ptr() % ALIGNMENT :]
        return [
            None if piece is None else memory[piece[0] : piece[0] + piece[1]].view(piece[2]).view(piece[3])
            for piece in self.pieces
        ]


class Kind:
    """What is known of all calls of a kind: their scratch and, after the first one, their kernels."""

    def __init__(self, device: torch.device, scratch: Scratch):
        self.device, self.scratch = device, scratch
        self.compiled: dict[str, tuple[Any, tuple[None, ...]]] = {}
        self.known = False  # whether all of its kernels are; never in Triton's interpreter, which has none

    def allocate(self) -> tuple[torch.Tensor, list]:
        """(memory, which has to be held until the call has launched its kernels, the pieces of scratch in it)."""
        memory = torch.empty(self.scratch.size, dtype=torch.uint8, device=self.device)
        return memory, self.scratch.addresses(memory) if self.known else self.scratch.tensors(memory)

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], *arguments: object, table: bool = False, **constants: object
    ) -> None:
        """Launches ``kernel`` with these arguments and constants. ``table``: as in ``tables.options``."""
        name = kernel.__name__
        if (found := self.compiled.get(name)) is not None:
            compiled, unread = found
            compiled[grid](*arguments, *unread)
            return
        compiled = kernel[grid](*arguments, **constants, **tables.options(name, self.device, table))
        if compiled is not None:
            # A compiled kernel takes its constants as well, and does not look at them.
            self.compiled[name] = compiled, (None,) * (len(kernel.arg_names) - len(arguments))

    def ended(self, memory: torch.Tensor) -> None:
        """Says that a call has launched all of its kernels, until when its memory must be nobody else's."""
        self.known = bool(self.compiled)


_kinds: dict[Hashable, Kind] = {}


def described(tensors: Sequence[torch.Tensor | None]) -> tuple[list[int | None], tuple]:
    """([n] addresses, of which device, dtype, shape and alignment the tensors are). Strides are no part of this."""
    addresses = [None if t is None else t.data_ptr() for t in tensors]
    forms = [
        None if t is None or address is None else (t.get_device(), t.dtype, t.shape, address % ALIGNMENT)
        for t, address in zip(tensors, addresses, strict=True)
    ]
    return addresses, tuple(forms)


def kind_of(form: Hashable, device: torch.device, scratch: Callable[[], Scratch]) -> Kind:
    """The kind of all calls of this form, which says of them whatever their launches depend on, but for the device."""
    key = form, device
    if (kind := _kinds.get(key)) is None:
        if len(_kinds) >= MOST_KINDS:
            _kinds.clear()
        kind = _kinds[key] = Kind(device, scratch())
    return kind


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
