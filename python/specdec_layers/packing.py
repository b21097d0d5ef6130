"""What packed weights are: the blocks of GGUF and the float32 numbers that they stand for, bit for bit those of the
package gguf, and the order of their bytes in which kernels read them (``csrc/layers/cpu/packed.h``)."""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch


class Packing(enum.IntEnum):
    """How a weight is stored that is no tensor of floats. On a CPU in blocks of GGUF, each of some inputs of a row in a
    number of bytes, with scales of its own; the values are those of GGUF's GGMLQuantizationType. On an NVIDIA GPU as
    ``INT8``, which no file has (:func:`specdec_layers.pack_int8`). ``NONE``: the tensor's dtype says it."""

    NONE = 0
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 8
    Q4_K = 12
    Q6_K = 14
    INT8 = 256

    @property
    def is_of_blocks(self) -> bool:
        """Whether rows are GGUF's blocks."""
        return self not in (Packing.NONE, Packing.INT8)

    @property
    def block(self) -> tuple[int, int]:
        """The inputs of a block, and its bytes. Of ``NONE``, (1, 0); of ``INT8`` without the scale of its row."""
        return _BLOCKS[self]


_BLOCKS = {
    Packing.NONE: (1, 0),
    Packing.Q4_0: (32, 18),
    Packing.Q4_1: (32, 20),
    Packing.Q8_0: (32, 34),
    Packing.Q4_K: (256, 144),
    Packing.Q6_K: (256, 210),
    Packing.INT8: (64, 64),
}

QUANTISES = (Packing.Q8_0, Packing.Q4_0)
TILE = 16  # rows that are interleaved


def dequantise(blocks: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Returns the numbers that packed rows stand for.

    Args:
        blocks: [..., bytes] uint8: whole blocks, as GGUF stores them.
        packing: any but ``Packing.NONE``.

    Returns:
        [..., inputs] float32.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """
    expand = _EXPANDS.get(packing)
    if expand is None:
        raise ValueError(f"packing: got {packing!r}, allowed: {', '.join(p.name for p in _EXPANDS)}")
    inputs, size = packing.block
    if blocks.dtype != torch.uint8 or blocks.dim() == 0 or blocks.shape[-1] % size:
        given = f"{blocks.dtype} of shape {list(blocks.shape)}"
        raise ValueError(f"blocks: got {given}, allowed: uint8, of blocks of {size} bytes each")
    numbers = expand(blocks.reshape(-1, size))
    return numbers.reshape(*blocks.shape[:-1], blocks.shape[-1] // size * inputs)


def quantise(numbers: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Returns rows of numbers in blocks, rounded as GGUF's files are.

    Args:
        numbers: [..., inputs] of a floating dtype; a row has a multiple of 32.
        packing: ``Packing.Q8_0`` or ``Packing.Q4_0``.

    Returns:
        [..., bytes] uint8.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """
    if packing not in QUANTISES:
        raise ValueError(f"packing: got {packing!r}, allowed: {', '.join(p.name for p in QUANTISES)}")
    inputs, size = packing.block
    if not numbers.is_floating_point() or numbers.dim() == 0 or numbers.shape[-1] % inputs:
        given = f"{numbers.dtype} of shape {list(numbers.shape)}"
        raise ValueError(f"numbers: got {given}, allowed: floating numbers, a multiple of {inputs} a row")
    of_blocks = numbers.detach().float().reshape(-1, inputs)
    if packing == Packing.Q8_0:
        scale = of_blocks.abs().amax(1, True) / 127
        scaled = of_blocks * _inverse(scale)
        quants = (scaled.abs() + 0.5).floor() * scaled.sign()  # halves away from 0
        bytes_of_quants = quants.to(torch.int8).view(torch.uint8)
    else:
        largest = of_blocks.gather(1, of_blocks.abs().argmax(1, True))
        scale = largest / -8
        shifted = of_blocks.double() * _inverse(scale).double() + 8.5
        low, high = shifted.float().trunc().clamp(0, 15).to(torch.uint8).chunk(2, 1)
        bytes_of_quants = low | high << 4
    blocks = torch.cat([scale.half().view(torch.uint8), bytes_of_quants], 1)
    return blocks.reshape(*numbers.shape[:-1], numbers.shape[-1] // inputs * size)


def interleave(blocks: torch.Tensor) -> torch.Tensor:
    """Returns packed rows as kernels read them: of each 16 rows the first two bytes, then their next two, and so on.

    Args:
        blocks: [rows, bytes of a row] uint8, an even number of bytes.

    Returns:
        a new tensor of the same shape. The last rows, if they are fewer than 16, are interleaved with each other.
    """
    units = blocks.contiguous().view(torch.int16)
    whole = units.shape[0] // TILE * TILE
    tiles = units[:whole].view(-1, TILE, units.shape[1]).transpose(1, 2)
    return torch.cat([tiles.reshape(-1), units[whole:].T.reshape(-1)]).view(torch.uint8).view(blocks.shape)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0, 1 / scale)


def _half(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Returns the float16 number [n, 1] at a byte of each block."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(quants: torch.Tensor) -> torch.Tensor:
    """Returns the lower halves of the bytes [..., m], then the upper ones, [..., 2 m]."""
    return torch.cat([quants & 15, quants >> 4], -1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).char() - 8).float()


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    # Eight times 32 inputs, whose scales and minima have 6 bits each: the first four in the lower bits of a byte each,
    # and of the others the upper 2 bits in the same bytes, the lower ones in the last four.
    first, second, last = blocks[:, 4:16].split(4, 1)
    scales = torch.cat([first & 63, last & 15 | first >> 6 << 4], 1).float()
    minima = torch.cat([second & 63, last >> 4 | second >> 6 << 4], 1).float()
    quants = _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32).float()
    scales, minima = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    return scales[..., None] * quants - minima[..., None]


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    # Two times 128 inputs: 64 bytes with the lower 4 bits of two each, 32 with the upper 2 bits of four each.
    lower = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    upper = torch.stack([blocks[:, 128:192].view(-1, 2, 32) >> shift & 3 for shift in (0, 2, 4, 6)], 2)
    quants = (lower | upper << 4).char() - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return scales[..., None] * quants.view(-1, 16, 16).float()


_EXPANDS: dict[Packing, Callable[[torch.Tensor], torch.Tensor]] = {
    Packing.Q4_0: _q4_0,
    Packing.Q4_1: _q4_1,
    Packing.Q8_0: _q8_0,
    Packing.Q4_K: _q4_k,
    Packing.Q6_K: _q6_k,
}
