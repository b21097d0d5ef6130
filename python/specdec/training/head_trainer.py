"""The loop of a head's training: a draft's, with lessons of features, and judged by decoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..drafters.heads import HeadDrafter
from .features import CachedFeatures, Features
from .heads.learner import Learner
from .held_out import Worth
from .lessons import Lessons
from .measured import measure
from .trainer import Trainer, TrainSettings


class HeadTrainer(Trainer):
    """
    Args:
        prompts: that it is judged by, each continued by ``new`` tokens.
        features: what the head reads of texts.
        known: the same of the data; None: it is computed in each step.
        lessons, settings, folder, asked: as for a draft.
    """

    def __init__(
        self,
        learner: Learner,
        lessons: Lessons,
        prompts: Sequence[Sequence[int]],
        new: int,
        settings: TrainSettings,
        folder: Path,
        asked: Mapping[str, object],
        features: Features,
        known: CachedFeatures | None = None,
    ):
        self._learner, self._prompts, self._new, self._features, self._known = learner, prompts, new, features, known
        self._hits: list[float] = []
        self._learned: list[float] = []
        super().__init__(learner.target.model, learner.head, lessons, (), settings, folder, asked)

    def _loss(self, step: int, tokens: torch.Tensor, blocks: torch.Tensor | None) -> torch.Tensor:
        if self._known is not None and blocks is not None:
            lesson = self._known.of(blocks)
        else:
            lesson = self._features.lesson(tokens)
        chance = torch.Generator().manual_seed(self._settings.seed * 1_000_003 + step)
        with self._autocast():
            loss, self._learned = self._learner.learn(lesson, chance)
        return loss

    def _worth(self) -> list[Worth]:
        drafter, settings = HeadDrafter(self._learner.head), self._settings
        found, self._hits = measure(
            self._target, drafter, self._prompts, self._new, settings.num_drafts, settings.seed
        )  # fmt: skip
        return found

    def _noted(self) -> dict[str, Any]:
        """How often the drafts of each depth were right: of decoders, and in the last step of the training."""
        return {"hits": self._hits, "training_hits": self._learned}
