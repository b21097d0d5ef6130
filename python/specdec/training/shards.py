"""Tensors of every block of the data, computed once and kept in safetensors files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import PreTrainedModel

from ..checks import refuse
from ..files import write_whole


class Shards:
    """A subclass says what is computed. What a killed process has written is not computed again.

    Args:
        name: of the argument that asks for this, for errors.
        folder: made if there is none.
        blocks: [n, L] int64.
        shard: blocks of a file.
        target: the model that computes.
        settings: entries, on which the tensors depend besides target and blocks; errors tell its name.

    Raises:
        ValueError: names ``name``: the folder has tensors of another target, other texts or other settings.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        blocks: torch.Tensor,
        shard: int,
        target: PreTrainedModel,
        settings: Mapping[str, Any],
    ):
        self._name, self._folder, self._blocks, self._shard, self._settings = name, folder, blocks, shard, settings
        key = {"target": fingerprint(target), "blocks": digest(blocks), **settings}
        self._key = json.dumps(key, sort_keys=True)
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def shards(self) -> int:
        return -(-len(self._blocks) // self._shard)

    def fill(self, size: int, told: Callable[[int, int], None]) -> None:
        """Computes what is missing, by forwards of ``size`` blocks. Raises OSError if it cannot be written."""
        for number in range(self.shards):
            told(number, self.shards)
            if not self._path(number).exists():
                own = self._blocks[number * self._shard : (number + 1) * self._shard]
                parts = [self._compute(part) for part in own.split(size)]
                tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
                write_whole(self._path(number), save(tensors, {"key": self._key}))
            else:
                self._check(number)

    def _compute(self, blocks: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns tensors on the CPU, the first dimension of which is that of ``blocks``."""
        raise NotImplementedError

    def _row(self, index: int) -> dict[str, torch.Tensor]:
        """The tensors of block ``index``."""
        number, row = divmod(index, self._shard)
        with safe_open(self._path(number), "pt") as file:  # mapped, so only this row is read
            return {name: file.get_slice(name)[row] for name in file.keys()}

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06}.safetensors"

    def _check(self, number: int) -> None:
        try:
            with safe_open(self._path(number), "pt") as file:
                key = (file.metadata() or {}).get("key")
        except (SafetensorError, OSError) as error:
            refuse(self._name, f"{str(self._path(number))!r} ({error})", "a whole shard; remove it")
        if key != self._key:
            others = " or ".join(("data", *self._settings))
            refuse(self._name, f"{str(self._folder)!r}, of another target, {others}", "another folder")


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:32]


def fingerprint(model: PreTrainedModel) -> str:
    """Of the configuration and a few numbers of every weight."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    found = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for parameter in model.parameters():
        found.update(parameter.detach().flatten()[:16].float().cpu().numpy().tobytes())
    return found.hexdigest()[:32]
