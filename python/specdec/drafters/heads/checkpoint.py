"""A head's files: config.json and safetensors, and their weights put into the modules, each with its name and shape."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ...checks import refuse

# Tables that older files have beside their weights, and that are computed.
_COMPUTED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


@dataclass
class Checkpoint:
    """What a folder holds. ``tensors`` are on the CPU, under canonical names: without a prefix "model.", and with
    ``layers.0.`` for ``midlayer.``."""

    path: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def read(cls, path: str | os.PathLike) -> Checkpoint:
        """Reads a folder with config.json and *.safetensors.

        Raises:
            OSError: names what is missing or cannot be read.
        """
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise OSError(f"path: there is no folder {str(path)!r}")
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise OSError(f"path: cannot read config.json of {str(path)!r}: {error}") from error
        if not isinstance(config, dict):
            raise OSError(f"path: config.json of {str(path)!r} has no object")
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            legacy = sorted(f.name for f in folder.iterdir() if f.suffix in (".bin", ".pt", ".pth"))
            told = f" but {legacy[0]}, which tools/convert_head.py makes one of" if legacy else ""
            raise OSError(f"path: the folder {str(path)!r} has no *.safetensors{told}")
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            try:
                tensors |= load_file(file)
            except (OSError, SafetensorError) as error:
                raise OSError(f"path: cannot read {str(file)!r}: {error}") from error
        _require_shards(folder, tensors)
        kept = {canonical(name): t for name, t in tensors.items() if not _COMPUTED.search(name)}
        return cls(str(path), config, kept)

    def shape(self, name: str, dimensions: int) -> list[int]:
        """Returns the shape of a tensor that the head's own sizes follow from.

        Raises:
            ValueError: names the tensor, which is missing or has another number of dimensions.
        """
        if name not in self.tensors:
            refuse(name, f"no such tensor in {self.path!r}", f"one of {dimensions} dimensions")
        found = [*self.tensors[name].shape]
        if len(found) != dimensions:
            refuse(name, f"shape {found}", f"{dimensions} dimensions")
        return found

    def count(self, pattern: str) -> int:
        """Returns how many numbers from 0 on the names have at the group of ``pattern``.

        Raises:
            ValueError: a number in between is missing.
        """
        found = {int(match[1]) for name in self.tensors if (match := re.match(pattern, name))}
        if found != {*range(len(found))}:
            missing = min({*range(max(found))} - found)
            refuse(re.sub(r"\\|\(.*?\)", "", pattern), f"tensors without number {missing}", f"all of 0 to {max(found)}")
        return len(found)

    def fill(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Puts all tensors into ``module``, whose weights have no values yet.

        Raises:
            ValueError: names the tensor that is missing, has another shape or dtype, or is none of the head's.
        """
        wanted = module.state_dict()
        for name, weight in wanted.items():
            if name not in self.tensors:
                refuse(name, f"no such tensor in {self.path!r}", f"shape {[*weight.shape]}")
            given = self.tensors[name]
            if given.shape != weight.shape:
                refuse(name, f"shape {[*given.shape]}", f"{[*weight.shape]}")
            if not given.is_floating_point() or given.itemsize < 2:
                refuse(name, str(given.dtype), "a floating dtype of 16 bits or more")
        if unknown := sorted(self.tensors.keys() - wanted.keys()):
            shape = [*self.tensors[unknown[0]].shape]
            refuse(unknown[0], f"a tensor of shape {shape}", f"no more than the {len(wanted)} of this format")
        placed = {name: self.tensors[name].to(device, dtype) for name in wanted}
        module.load_state_dict(placed, assign=True)
        module.requires_grad_(False).eval()


def canonical(name: str) -> str:
    """Returns the name of a tensor as in this package, whoever wrote the file."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    return f"medusa_head.{name}" if re.match(r"\d+\.\d+\.", name) else name


def _require_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Raises OSError if an index names tensors that no file has."""
    for index in folder.glob("*.safetensors.index.json"):
        try:
            listed = json.loads(index.read_text())["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OSError(f"path: cannot read {str(index)!r}: {error}") from error
        if absent := sorted(listed.keys() - tensors.keys()):
            raise OSError(f"path: {listed[absent[0]]!r} with the tensor {absent[0]!r} is missing in {str(folder)!r}")
