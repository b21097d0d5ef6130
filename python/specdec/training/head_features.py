"""The target's hidden states in a text, read as decoding reads them: in prefill, by the same hooks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ..checks import refuse
from ..drafters.heads.vocabulary import target_head
from ..models.cache.features import FeatureStore
from ..models.forward.cached_model import CachedModel
from ..models.forward.prefill import OnLogits
from .heads.learner import Lesson
from .shards import Shards

SHARD_BYTES = 256 << 20


class Features:
    """Makes lessons of texts.

    Args:
        states: which hidden states, as :class:`~specdec.models.cache.features.FeatureStore` counts.
        kept: [n] int64: the tokens that the head drafts, the only ones that lessons tell of; None: all.
    """

    def __init__(self, target: CachedModel, states: Sequence[int], kept: torch.Tensor | None = None):
        self.target, self.states, self.kept = target, tuple(states), kept

    def lesson(self, tokens: torch.Tensor) -> Lesson:
        """Of ``tokens`` [B, L] int64."""
        states, logits = self.read(tokens, self.states)
        return self.lesson_of(tokens, states, self.of_kept(logits))

    def lesson_of(self, tokens: torch.Tensor, states: torch.Tensor, logits: torch.Tensor) -> Lesson:
        """The distributions are made once, although a head learns from each of them at several depths.

        Args:
            logits: [B, L, n], of the kept tokens.
        """
        return Lesson(tokens.to(self.target.device), states.float(), logits.float().log_softmax(-1))

    def of_kept(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.kept is None else logits[..., self.kept]

    def read(self, tokens: torch.Tensor, states: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the states [B, L, len(states) * h], those of one token side by side, and logits [B, L, V], both in
        the target's dtype."""
        logits: list[dict[int, torch.Tensor]] = [{} for _ in tokens]  # by position: one may come again

        def keep(row: int, position: int, fed: torch.Tensor) -> None:
            logits[row][position] = fed

        taken = self.record(tokens, states, keep)
        return taken, torch.stack([torch.cat([*of.values()]) for of in logits])

    @torch.no_grad()
    def record(self, tokens: torch.Tensor, states: Sequence[int], on_logits: OnLogits | None = None) -> torch.Tensor:
        """Returns the states alone, without the logits if nobody asks for them."""
        target, (size, length) = self.target, tokens.shape
        capacity, width = target.capacity(length), len(states) * target.config.hidden_size
        cache = target.new_cache(size, capacity)
        cache.features = FeatureStore(states, lambda taken: taken, size, capacity, width, target.dtype, target.device)
        target.prefill(cache, tokens.tolist(), on_logits)
        return cache.features.features[:, :length]


class CachedFeatures(Shards):
    """Of each token of the data the states that a head reads, and the final one, of which the target's last matrix
    makes the logits again.

    Args:
        folder: which is made if there is none.
        blocks: [n, L] int64.

    Raises:
        ValueError: names ``cache_features``: the folder has states of another target, other texts or other layers, or
            the target does more to its logits than its last matrix does.
    """

    def __init__(self, folder: Path, features: Features, blocks: torch.Tensor):
        target = features.target
        final, own = target.config.num_hidden_layers, features.states
        self._features, self._width = features, target.config.hidden_size
        self._recorded = own if final in own else (*own, final)
        self._head = target_head(target.model, self._width, features.kept)
        block_bytes = blocks.shape[1] * len(self._recorded) * self._width * target.dtype.itemsize
        shard = max(SHARD_BYTES // block_bytes, 1)
        super().__init__("cache_features", folder, blocks, shard, target.model, {"layers": self._recorded})
        self._check_logits(blocks[:1])

    def of(self, indices: torch.Tensor) -> Lesson:
        """The lesson of these blocks."""
        target = self._features.target
        taken = torch.stack([self._row(int(i))["states"] for i in indices]).to(target.device)
        own = taken[..., : len(self._features.states) * self._width]
        return self._features.lesson_of(self._blocks[indices], own, self._logits(taken))

    def _compute(self, blocks: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"states": self._features.record(blocks, self._recorded).contiguous().cpu()}

    @torch.no_grad()
    def _logits(self, taken: torch.Tensor) -> torch.Tensor:
        target = self._features.target
        at = self._recorded.index(target.config.num_hidden_layers) * self._width
        return self._head(taken[..., at : at + self._width])

    def _check_logits(self, block: torch.Tensor) -> None:
        target = self._features.target
        taken, logits = self._features.read(block, self._recorded)
        logits = self._features.of_kept(logits)
        difference, size = (self._logits(taken) - logits).float().abs().max(), logits.float().abs().max()
        if not difference <= torch.finfo(target.dtype).eps ** 0.5 * size:
            given = f"True for model type {target.config.model_type!r}, whose logits are not its last matrix's alone"
            refuse(self._name, given, "False")
