"""Moves the accepted nodes' keys and values of all layers in one launch, on a GPU.

Imported on first use, since Triton takes long to import and is not installed everywhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

UNITS = {4: tl.int32, 2: tl.int16, 1: tl.int8}  # by bytes: numbers are moved as bits, whatever their dtype
BLOCK = 512  # units of a token that a program moves


@triton.jit
def compact_kernel(
    addresses, heads, sizes, places, lengths, path, stride, most, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    """One program for a part of each token's numbers, in each storage and sequence.

    A path's numbers ascend, so node i of a path has at least the number i: what is written to slot i of the tree is
    never what a later turn reads, and no turn waits for another thread."""
    storage, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    count, size = tl.load(heads + storage), tl.load(sizes + storage)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    capacity, root = tl.load(places + storage), tl.load(lengths + row)
    numbers = tl.load(addresses + storage).to(tl.pointer_type(UNIT)) + column % size
    numbers += (row * count + column // size) * capacity * size
    for i in range(most):
        node = tl.load(path + row * stride + i)
        if node > i:
            there = column < count * size
            old, new = (root + 1 + node) % capacity, (root + 1 + i) % capacity
            tl.store(numbers + new * size, tl.load(numbers + old * size, there), there)


class Compaction:
    """The storage of all layers of a cache: keys or values [B, H_kv, S, D] each, or rings of S places, contiguous."""

    def __init__(self, storages: list[torch.Tensor]):
        self.storages = storages
        device = storages[0].device
        tokens = [s.shape[3] * s.dtype.itemsize for s in storages]  # bytes of a head
        unit = next(unit for unit in UNITS if all(size % unit == 0 for size in tokens))
        self.unit = UNITS[unit]
        self.sizes = torch.tensor([size // unit for size in tokens], device=device)
        self.places = torch.tensor([s.shape[2] for s in storages], device=device)
        self.heads = torch.tensor([s.shape[1] for s in storages], device=device)
        self.addresses = torch.tensor([s.data_ptr() for s in storages], device=device)
        self.parts = max(triton.cdiv(s.shape[1] * size, unit * BLOCK) for s, size in zip(storages, tokens, strict=True))

    def __call__(self, lengths: torch.Tensor, path: torch.Tensor) -> None:
        """Does what ``StaticKVCache.compact`` does, for ``lengths`` [B] and ``path`` [B, D] int64."""
        path = path.contiguous()
        grid = self.parts, len(self.storages), len(path)
        with torch.cuda.device_of(path):
            compact_kernel[grid](
                self.addresses, self.heads, self.sizes, self.places, lengths, path, path.shape[1], path.shape[1],
                UNIT=self.unit, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
