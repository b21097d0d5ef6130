"""Weights of 8 bits as the linear kernel of a GPU reads them (``csrc/layers/cuda/linear.h``): integers with a scale a
row."""

from __future__ import annotations

import torch

ROWS, INPUTS = 8, 64  # of a tile: 16 neighbours for each thread of a warp
SCALE = 4  # bytes
LARGEST = 127


def pack_int8(weight: torch.Tensor) -> torch.Tensor:
    """Returns a matrix with each row rounded to 255 integers times a scale of its own: the nearest ones, of which the
    largest number of the row is 127 or -127.

    Args:
        weight: [outputs, inputs] of a floating dtype, finite; a multiple of 8 outputs and of 64 inputs.

    Returns:
        [outputs, inputs + 4] uint8 for ``Packing.INT8``: of each 8 rows their integers, 64 of each at a time, and then
        their scales in float32. So 8 rows, or 8 n of them, lie together and are a matrix of their own.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """
    sizes = weight.dim() == 2 and weight.shape[0] % ROWS == 0 and weight.shape[1] % INPUTS == 0
    if not weight.is_floating_point() or not sizes:
        given = f"{weight.dtype} of shape {[*weight.shape]}"
        raise ValueError(f"weight: got {given}, allowed: floating numbers, [8 n, {INPUTS} m]")
    outputs, inputs = weight.shape
    numbers = weight.detach().float()
    scales = numbers.abs().amax(1, True) / LARGEST
    integers = (numbers / scales.where(scales > 0, 1)).round().to(torch.int8)
    tiles = integers.view(-1, ROWS, inputs // INPUTS, INPUTS).transpose(1, 2).reshape(-1, ROWS * inputs)
    packed = torch.cat([tiles.view(torch.uint8), scales.view(-1, ROWS).view(torch.uint8)], 1)
    return packed.view(outputs, inputs + SCALE)


def unpack_int8(packed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the numbers that packed rows stand for, rounded once where ``dtype`` is narrower than float32.

    Args:
        packed: [outputs, inputs + 4] uint8, contiguous: what :func:`pack_int8` returned, or 8 n of its rows from a
            multiple of 8 on.
        dtype: a floating one.

    Returns:
        [outputs, inputs].

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """
    outputs, width = packed.shape[0], packed.shape[-1] - SCALE
    whole = packed.dim() == 2 and outputs % ROWS == 0 and width % INPUTS == 0
    if packed.dtype != torch.uint8 or not whole or not packed.is_contiguous():
        given = f"{packed.dtype} of shape {[*packed.shape]}"
        raise ValueError(f"packed: got {given}, allowed: uint8 of shape [8 n, {INPUTS} m + {SCALE}], contiguous")
    tiles = packed.view(-1, ROWS * (width + SCALE))
    integers = tiles[:, : ROWS * width].view(torch.int8).view(-1, width // INPUTS, ROWS, INPUTS).transpose(1, 2)
    scales = tiles[:, ROWS * width :].view(torch.float32)[:, :, None, None]
    # In one pass over the weights, since a prompt waits for it.
    numbers = packed.new_empty(integers.shape, dtype=dtype)
    return torch.mul(integers, scales, out=numbers).view(outputs, width)
