"""MTP layers of Nemotron-H, whose layers are blocks of one kind each: attention, and experts or an MLP. Several blocks
take the place of a decoder layer, and files number blocks, not layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...checks import refuse

_KINDS = {"*": "full_attention", "attention": "full_attention", "E": "moe", "-": "mlp"}
_FIRST = ("enorm", "hnorm", "eh_proj")  # what the first block of a layer has beside its own
_LAST = "final_layernorm"  # and the last one


class Blocks(nn.ModuleList):
    """Blocks that run one after the other, each fed the same mask and cache."""

    def forward(self, x: torch.Tensor, **inputs: Any) -> torch.Tensor:
        for block in self:
            x = block(x, **inputs)
        return x


def block_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the kinds of the blocks of one layer, as transformers names them, from config.json, where they are
    letters or names.

    Raises:
        ValueError: names the entry, if its blocks are not one of attention, and experts or MLPs.
    """
    names = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")
    name = next((name for name in names if config.get(name)), names[0])
    said = config.get(name) or "*E"
    kinds = tuple(_KINDS.get(str(kind), kind) for kind in said) if isinstance(said, str | list) else ()
    known = all(kind in _KINDS.values() for kind in kinds)
    if not known or kinds.count("full_attention") != 1:  # a layer has one place in the cache, and no state
        allowed = "one block of attention ('*') in a layer, and experts ('E') or MLPs ('-') beside it"
        refuse(name, f"{said!r} in config.json", allowed)
    return kinds


def by_layer(tensors: Mapping[str, torch.Tensor], blocks: int) -> dict[str, torch.Tensor]:
    """Gives tensors of ``mtp.layers.{block}`` the names ``mtp.layers.{layer}.{block of the layer}``, and what is beside
    the blocks our own names, without the number of a block."""
    return {_of_layer(name, blocks): tensor for name, tensor in tensors.items()}


def _of_layer(name: str, blocks: int) -> str:
    if (match := re.match(r"mtp\.layers\.(\d+)\.((\w+)\..+)$", name)) is None:
        return name
    layer, block = divmod(int(match[1]), blocks)
    if match[3] in _FIRST and block == 0:
        return f"mtp.layers.{layer}.{match[2]}"
    if match[3] == _LAST and block == blocks - 1:
        return f"mtp.layers.{layer}.norm{match[2].removeprefix(_LAST)}"
    return f"mtp.layers.{layer}.{block}.{match[2]}"


def by_block(name: str, blocks: int) -> str:
    """Returns the name that ``by_layer`` took for this one."""
    if (match := re.match(r"mtp\.layers\.(\d+)\.(?:(\d+)\.)?(.+)$", name)) is None:
        return name
    first, rest = int(match[1]) * blocks, match[3]
    if match[2] is not None:
        return f"mtp.layers.{first + int(match[2])}.{rest}"
    if rest.startswith("norm."):
        return f"mtp.layers.{first + blocks - 1}.{_LAST}{rest.removeprefix('norm')}"
    return f"mtp.layers.{first}.{rest}"
