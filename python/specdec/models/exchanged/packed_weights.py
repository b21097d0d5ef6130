"""Layers of a model on a CPU whose weights are stored in few bits, in the blocks of GGUF.

A packed layer rounds its inputs to 16 bits (:func:`specdec_layers.linear`). But for that it computes, in float32, what
the weights give that its blocks stand for (:func:`specdec_layers.dequantise`), and the same bits for any number of
tokens.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from specdec_layers import Packing, stored_rows, unpack_int8
from torch import nn
from torch.nn import functional as F

from ...checks import refuse
from .copied_modules import reclass
from .int8_linear import Int8Linear, rows_of_int8
from .linear import NativeLinear

ROWS_AT_ONCE = 4096  # of a weight that is written anew


class PackedLinear(NativeLinear):
    """A linear layer of packed weights, made by :func:`pack`.

    Attributes:
        weight: [outputs, bytes of a row] uint8, interleaved, without gradients.
        packing: how its rows are stored.
    """

    def weight_as(self, dtype: torch.dtype) -> torch.Tensor:
        return cast(torch.Tensor, weight_of(self)).to(dtype)


class StoredEmbedding:
    """Of an ``nn.Embedding``, or a class that does more with the rows of its table: the table is stored in another
    dtype than float32, which the rows become that are asked for."""

    weight: torch.Tensor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        ids = tokens if tokens.dtype == torch.int64 else tokens.long()
        rows, own = self.rows(ids), super().forward  # type: ignore[misc]
        if rows is None:
            return own(tokens)
        if own.__func__ is nn.Embedding.forward and vars(self)["max_norm"] is None:
            return rows
        few: Any = copy.copy(self)  # its own forward, over a table of these rows
        few._parameters = {**few._parameters, "weight": rows.view(tokens.numel(), -1)}
        few.padding_idx = None
        return few.forward(torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape))

    def rows(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Returns the rows [..., width] of the table for tokens [...]; None: the table is of the dtype that it computes
        in."""
        if self.weight.dtype not in (torch.bfloat16, torch.float16):
            return None
        if torch.is_grad_enabled() or self.weight.device.type != "cpu":
            return F.embedding(tokens, self.weight).float()
        return stored_rows(self.weight, tokens)


class PackedEmbedding(StoredEmbedding):
    """Of an embedding whose table is packed, with the attributes of :class:`PackedLinear`. Made by :func:`pack`."""

    packing: Packing
    computes: torch.Tensor  # empty; of the dtype of its rows, which `double()` and the like change with the model's

    def rows(self, tokens: torch.Tensor) -> torch.Tensor | None:
        if self.weight.dtype != torch.uint8:
            return None
        return stored_rows(self.weight, tokens, self.packing).to(self.computes.dtype)


def pack(module: nn.Linear | nn.Embedding, blocks: torch.Tensor, packing: Packing) -> None:
    """Gives a linear layer or an embedding packed weights, in place. The other parameters stay, and should be float32.

    Args:
        module: an ``nn.Linear`` and no more, or an ``nn.Embedding`` whose forward takes tokens alone. Its weights may
            be on the device "meta".
        blocks: [rows, bytes of a row] uint8 on a CPU, contiguous: of :attr:`Packing.block` bytes for so many inputs,
            and interleaved (:func:`specdec_layers.interleave`). Layers that share their weights are given the same
            parameter.
        packing: how they are stored.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """
    inputs, size = packing.block
    is_linear = type(module) in (nn.Linear, NativeLinear)
    if not is_linear and not isinstance(module, nn.Embedding) or isinstance(module, PackedEmbedding):
        refuse("module", type(module).__name__, "an nn.Linear or an nn.Embedding")
    rows, width = module.weight.shape
    if not packing.is_of_blocks or width % inputs:
        allowed = ", ".join(p.name for p in Packing if p.is_of_blocks and width % p.block[0] == 0) or "none"
        refuse("packing", packing.name, f"{allowed} for rows of {width} numbers")
    shape = [rows, width // inputs * size]
    if blocks.dtype != torch.uint8 or [*blocks.shape] != shape or not blocks.is_contiguous():
        refuse("blocks", f"{blocks.dtype} of shape {[*blocks.shape]}", f"uint8 of shape {shape}, contiguous")
    shared = isinstance(blocks, nn.Parameter)
    module.weight = cast(nn.Parameter, blocks) if shared else nn.Parameter(blocks, requires_grad=False)
    vars(module)["packing"] = packing
    if is_linear:
        module.__class__ = PackedLinear
    else:
        module.register_buffer("computes", torch.empty(0), persistent=False)
        reclass(module, PackedEmbedding)


def is_packed(module: object) -> bool:
    """Whether its ``weight`` are blocks, or integers with scales."""
    return isinstance(module, PackedLinear | PackedEmbedding | Int8Linear)


def width_of(module: nn.Linear | nn.Embedding) -> int:
    """Returns how many numbers a row of its weights has."""
    if is_packed(module):
        return module.in_features if isinstance(module, nn.Linear) else module.embedding_dim
    return module.weight.shape[-1]


def rows_of(module: nn.Linear | nn.Embedding, rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows [..., width] of a layer's weights with the numbers ``rows`` [...], as floats."""
    weight = module.weight.detach()
    if isinstance(module, Int8Linear):
        return rows_of_int8(weight, rows.to(weight.device))
    if isinstance(module, PackedLinear | PackedEmbedding):
        return stored_rows(weight, rows.to(weight.device), module.packing)
    return F.embedding(rows.to(weight.device), weight)


def weight_of(module: nn.Module) -> torch.Tensor | None:
    """Returns the numbers that the weights of a layer stand for, without gradients; None: it has none."""
    weight = getattr(module, "weight", None)
    if isinstance(module, Int8Linear):
        return unpack_int8(module.weight.detach())
    if isinstance(module, PackedLinear | PackedEmbedding):
        rows = torch.arange(module.weight.shape[0])
        return torch.cat([rows_of(cast(nn.Linear, module), some) for some in rows.split(ROWS_AT_ONCE)])
    return weight.detach() if isinstance(weight, torch.Tensor) else None


def num_parameters(module: nn.Module) -> int:
    """Returns how many numbers the parameters of a model, or of a part of it, stand for."""
    counts = {id(p): p.numel() for p in module.parameters()}
    for part in module.modules():
        if is_packed(part):
            packed = cast(nn.Linear, part)
            counts[id(packed.weight)] = packed.weight.shape[0] * width_of(packed)
    return sum(counts.values())
