"""The target's most likely tokens at every position of the data, computed once and kept in safetensors shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import PreTrainedModel

from ..checks import refuse
from ..files import write_whole
from .losses import Wanted

SHARD = 64  # blocks


class CachedLogits:
    """Of each position the ``top`` most likely tokens with their log-probabilities, and that of all others together:
    8 bytes for each. What a killed process has written is not computed again.

    Args:
        folder: which is made if there is none.
        blocks: [n, L] int64; a block has L - 1 positions, each about the token after it.
        top: from 1.

    Raises:
        ValueError: names ``cache_logits``: the folder has logits of another target, other texts or another ``top``.
    """

    def __init__(self, folder: Path, target: PreTrainedModel, blocks: torch.Tensor, top: int):
        self._folder, self._target, self._blocks, self._top = folder, target, blocks, top
        self._key = json.dumps({"target": _fingerprint(target), "blocks": _digest(blocks), "top": top}, sort_keys=True)
        self._open: tuple[int, dict[str, torch.Tensor]] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def shards(self) -> int:
        return -(-len(self._blocks) // SHARD)

    def fill(self, size: int, told: Callable[[int, int], None]) -> None:
        """Computes what is missing, by forwards of ``size`` blocks. Raises OSError if it cannot be written."""
        for number in range(self.shards):
            told(number, self.shards)
            if not self._path(number).exists():
                parts = [
                    self._compute(part) for part in self._blocks[number * SHARD : (number + 1) * SHARD].split(size)
                ]
                tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
                write_whole(self._path(number), save(tensors, {"key": self._key}))
            else:
                self._check(number)

    def of(self, indices: torch.Tensor) -> Wanted:
        """The target's distributions at all positions of these blocks, one block after the other."""
        rows = [self._row(int(i)) for i in indices]
        device = self._target.device
        return Wanted(
            torch.cat([row["log_p"] for row in rows]).to(device),
            torch.cat([row["ids"] for row in rows]).long().to(device),
        )

    @torch.inference_mode()
    def _compute(self, blocks: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self._target(input_ids=blocks[:, :-1].to(self._target.device), use_cache=False).logits
        wanted, positions = Wanted.of(logits, self._top), blocks.shape[1] - 1
        assert wanted.ids is not None
        return {
            "log_p": wanted.log_p.view(len(blocks), positions, -1).cpu(),
            "ids": wanted.ids.view(len(blocks), positions, -1).int().cpu(),
        }

    def _row(self, index: int) -> dict[str, torch.Tensor]:
        number, row = divmod(index, SHARD)
        with safe_open(self._path(number), "pt") as file:  # mapped, so only this row is read
            return {name: file.get_slice(name)[row] for name in ("log_p", "ids")}

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06}.safetensors"

    def _check(self, number: int) -> None:
        try:
            with safe_open(self._path(number), "pt") as file:
                key = (file.metadata() or {}).get("key")
        except (SafetensorError, OSError) as error:
            refuse("cache_logits", f"{str(self._path(number))!r} ({error})", "a whole shard; remove it")
        if key != self._key:
            refuse("cache_logits", f"{str(self._folder)!r}, of another target, data or number", "another folder")


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:32]


def _fingerprint(model: PreTrainedModel) -> str:
    """Of the configuration and a few numbers of every weight."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    found = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for parameter in model.parameters():
        found.update(parameter.detach().flatten()[:16].float().cpu().numpy().tobytes())
    return found.hexdigest()[:32]
