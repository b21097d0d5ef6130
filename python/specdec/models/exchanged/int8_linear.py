"""Linear layers of a GPU whose weights are stored in 8 bits, as integers with a scale a row."""

from __future__ import annotations

from typing import TypeGuard

import torch
from specdec_layers import Packing, pack_int8, unpack_int8
from torch import nn

from .linear import is_plain
from .product import DTYPES, ROWS_INT8, deferred_product, product

AT_ONCE = 512  # rows that are looked up
INPUTS = Packing.INT8.block[0]


class Int8Linear(nn.Linear):
    """What ``nn.Linear`` computes with the numbers that its weights stand for. Made by :func:`to_int8`.

    Attributes:
        weight: uint8, as :func:`specdec_layers.pack_int8` returns them, without gradients.
    """

    packing = Packing.INT8

    def weight_as(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the numbers [outputs, inputs] that its weights stand for."""
        return unpack_int8(self.weight, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self.weight, self.bias)


class LastInt8Linear(Int8Linear):
    """The last layer of a branch, as :class:`.linear.LastLinear`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self._forward_hooks else deferred_product(x, self.weight, self.bias)


def rows_of_int8(packed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns the numbers [..., inputs] of some rows [...] int64 of packed weights, as float32."""
    tiles, found = packed.view(-1, ROWS_INT8, packed.shape[1]), list[torch.Tensor]()
    for some in rows.flatten().split(AT_ONCE):
        whole = unpack_int8(tiles[some // ROWS_INT8].flatten(0, 1)).unflatten(0, (-1, ROWS_INT8))
        found.append(whole[torch.arange(len(some), device=some.device), some % ROWS_INT8])
    return torch.cat(found).view(*rows.shape, -1)


def can_be_int8(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is an ``nn.Linear`` and no more, on a CPU, of 16 bits and of whole tiles of the kernel."""
    return is_plain(module, *DTYPES) and module.out_features % ROWS_INT8 == 0 and module.in_features % INPUTS == 0


def to_int8(layers: list[nn.Linear], device: torch.device | str) -> int:
    """Rounds the weights of such layers in place, on ``device``, one after the other. Layers that share their weights
    share them afterwards; who else has them keeps them as they are. Returns how many numbers the new weights are."""
    packed: dict[int, nn.Parameter] = {}
    whole = [layer.weight for layer in layers]  # so that no other object has the same number meanwhile
    for layer, weight in zip(layers, whole, strict=True):
        if id(weight) not in packed:
            packed[id(weight)] = nn.Parameter(pack_int8(weight.detach().to(device)), requires_grad=False)
        layer.weight = packed[id(weight)]
        layer.__class__ = Int8Linear
    return sum(layer.numel() for layer in {id(weight): weight for weight in whole}.values())
