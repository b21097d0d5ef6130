"""A head's files: config.json and safetensors, and their weights put into the modules, each with its name and shape."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ...checks import refuse
from .fields import OF_HEADS, check_fields, without_nulls

# Tables that older files have beside their weights, and that are computed.
_COMPUTED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
# What an MTP layer has beside its decoder layer. A target's files have its layers among all of the target's.
_PART = r"(?:enorm|hnorm|eh_proj|token_layernorm|hidden_layernorm|input_proj|fc)\."
_MTP = re.compile(rf"(mtp\.(?=(?:layers\.\d+\.)?{_PART})|.*layers\.\d+\.(?={_PART}))")


@dataclass
class Checkpoint:
    """What a folder holds. ``tensors`` are on the CPU, under canonical names: without a prefix "model.", and with
    ``layers.0.`` for ``midlayer.``. Of a target's files they are the MTP layers alone. ``written`` makes a name one
    that the files have, for errors."""

    path: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    written: Callable[[str], str] = field(default=str)

    @classmethod
    def read(cls, path: str | os.PathLike) -> Checkpoint:
        """Reads a folder with config.json and *.safetensors.

        Raises:
            OSError: names what is missing or cannot be read.
            ValueError: names the entry of config.json.
        """
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise OSError(f"path: there is no folder {str(path)!r}")
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError, RecursionError) as error:  # the last for lists in lists in lists
            raise OSError(f"path: cannot read config.json of {str(path)!r}: {error}") from error
        if not isinstance(config, dict):
            raise OSError(f"path: config.json of {str(path)!r} has no object")
        config = without_nulls(config)
        check_fields(config, OF_HEADS)
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            legacy = sorted(f.name for f in folder.iterdir() if f.suffix in (".bin", ".pt", ".pth"))
            told = f" but {legacy[0]}, which tools/convert_head.py makes one of" if legacy else ""
            raise OSError(f"path: the folder {str(path)!r} has no *.safetensors{told}")
        tensors = _read(folder, files)
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

    def fill(
        self, module: nn.Module, dtype: torch.dtype, device: torch.device, in_float32: tuple[str, ...] = ()
    ) -> None:
        """Puts all tensors into ``module``, whose weights have no values yet, in ``dtype``, or in float32 those whose
        names end like this.

        Raises:
            ValueError: names the tensor that is missing, has another shape or dtype, or is none of the head's.
        """
        wanted = module.state_dict()
        for name, weight in wanted.items():
            if name not in self.tensors:
                refuse(self.written(name), f"no such tensor in {self.path!r}", f"shape {[*weight.shape]}")
            given = self.tensors[name]
            if given.shape != weight.shape:
                refuse(self.written(name), f"shape {[*given.shape]}", f"{[*weight.shape]}")
            if not given.is_floating_point() or given.itemsize < 2:
                refuse(self.written(name), str(given.dtype), "a floating dtype of 16 bits or more")
        if unknown := sorted(self.tensors.keys() - wanted.keys()):
            shape = [*self.tensors[unknown[0]].shape]
            refuse(
                self.written(unknown[0]), f"a tensor of shape {shape}", f"no more than the {len(wanted)} of this format"
            )
        placed = {
            name: self.tensors[name].to(device, torch.float32 if name.endswith(in_float32) else dtype)
            for name in wanted
        }
        module.load_state_dict(placed, assign=True)
        module.requires_grad_(False).eval()


def canonical(name: str) -> str:
    """Returns the name of a tensor as in this package, whoever wrote the file."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    return f"medusa_head.{name}" if re.match(r"\d+\.\d+\.", name) else name


def _read(folder: Path, files: list[Path]) -> dict[str, torch.Tensor]:
    """Returns the head's tensors.

    Raises:
        OSError: names a file that cannot be read, or a tensor that an index lists and no file has.
    """
    listed, tensors = _listed(folder), dict[str, torch.Tensor]()
    with ExitStack() as stack:
        opened: dict[str, Any] = {}
        for file in files:
            try:
                content = stack.enter_context(safe_open(file, "pt"))
            except (OSError, SafetensorError) as error:
                raise OSError(f"path: cannot read {str(file)!r}: {error}") from error
            opened |= dict.fromkeys(content.keys(), content)
        wanted = _of_a_head(opened.keys() | listed.keys())
        for name in sorted(wanted):
            if name not in opened:
                raise OSError(f"path: {listed[name]!r} with the tensor {name!r} is missing in {str(folder)!r}")
            tensors[name] = opened[name].get_tensor(name)
    return tensors


def _of_a_head(names: set[str]) -> set[str]:
    """Returns those of the tensors that are a head's: the MTP layers', if there are any, else all."""
    roots = tuple({match[1] for name in names if (match := _MTP.match(name))})
    return {name for name in names if name.startswith(roots)} if roots else names


def _listed(folder: Path) -> dict[str, str]:
    """Returns the tensors that an index names, with their files."""
    listed: dict[str, str] = {}
    for index in folder.glob("*.safetensors.index.json"):
        try:
            listed |= json.loads(index.read_text())["weight_map"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise OSError(f"path: cannot read {str(index)!r}: {error}") from error
    return listed
