"""The target's most likely tokens at every position of the data, computed once and kept in safetensors shards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import PreTrainedModel

from .losses import Wanted
from .shards import Shards, digest

SHARD = 64  # blocks


class CachedLogits(Shards):
    """Of each position the ``top`` most likely tokens with their log-probabilities, and that of all others together:
    8 bytes for each. What a killed process has written is not computed again.

    A draft of a smaller vocabulary is to learn the target's distribution over these tokens, so with ``ids`` it is what
    is kept, and tokens are columns of the draft's logits.

    Args:
        folder: which is made if there is none.
        blocks: [n, L] int64; a block has L - 1 positions, each about the token after it.
        top: from 1.
        ids: [n] int64, of the draft's columns; None: all tokens.
        autocast: in which the target computes.

    Raises:
        ValueError: names ``cache_logits``: the folder has logits of another target, other texts or another ``top``.
    """

    def __init__(
        self,
        folder: Path,
        target: PreTrainedModel,
        blocks: torch.Tensor,
        top: int,
        ids: torch.Tensor | None = None,
        autocast: Callable[[], torch.autocast] | None = None,
    ):
        kept = {} if ids is None else {"vocabulary": digest(ids)}
        super().__init__("cache_logits", folder, blocks, SHARD, target, {"number": top, **kept})
        self._target, self._top, self._ids, self._autocast = target, top, ids, autocast or nullcontext

    def of(self, indices: torch.Tensor) -> Wanted:
        """The target's distributions at all positions of these blocks, one block after the other."""
        rows = [self._row(int(i)) for i in indices]
        device = self._target.device
        return Wanted(
            torch.cat([row["log_p"] for row in rows]).to(device),
            torch.cat([row["ids"] for row in rows]).long().to(device),
        )

    @property
    def covered(self) -> float:
        """The probability that the target gives, on average over the first shard, to the tokens that are told apart."""
        rest = [self._row(i)["log_p"][:, -1] for i in range(min(SHARD, len(self._blocks)))]
        return 1 - torch.cat(rest).exp().mean().item()

    @torch.inference_mode()
    def _compute(self, blocks: torch.Tensor) -> dict[str, torch.Tensor]:
        with self._autocast():
            logits = self._target(input_ids=blocks[:, :-1].to(self._target.device), use_cache=False).logits
        logits = logits if self._ids is None else logits[..., self._ids]
        wanted, positions = Wanted.of(logits, self._top), blocks.shape[1] - 1
        assert wanted.ids is not None
        return {
            "log_p": wanted.log_p.view(len(blocks), positions, -1).cpu(),
            "ids": wanted.ids.view(len(blocks), positions, -1).int().cpu(),
        }
