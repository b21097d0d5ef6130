"""The loop of a head's training: a draft's, with lessons of features, and judged by decoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec_kernels import SamplingParams

from ..decoder import SpeculativeDecoder
from ..drafters.heads import HeadDrafter
from ..stats import Stats
from .head_features import CachedFeatures, Features
from .heads.learner import Learner
from .held_out import AT_ONCE, TEMPERATURES, Worth
from .lessons import Lessons
from .settings import DistillSettings
from .trainer import Trainer


class HeadTrainer(Trainer):
    """
    Args:
        prompts: that it is judged by, each continued by ``settings.new`` tokens.
        features: what the head reads of texts.
        known: the same of the data; None: it is computed in each step.
        lessons, folder, asked: as for a draft.
    """

    def __init__(
        self,
        learner: Learner,
        lessons: Lessons,
        prompts: Sequence[Sequence[int]],
        settings: DistillSettings,
        folder: Path,
        asked: Mapping[str, object],
        features: Features,
        known: CachedFeatures | None = None,
    ):
        self._learner, self._prompts = learner, prompts
        self._features, self._known = features, known
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
            self._target, drafter, self._prompts, settings.new, settings.num_drafts, settings.seed
        )  # fmt: skip
        return found

    def _noted(self) -> dict[str, Any]:
        """How often the drafts of each depth were right: of decoders, and in the last step of the training."""
        return {"hits": self._hits, "training_hits": self._learned}


def measure(
    target: PreTrainedModel,
    drafter: HeadDrafter,
    prompts: Sequence[Sequence[int]],
    new: int,
    num_drafts: int,
    seed: int,
) -> tuple[list[Worth], list[float]]:
    """Continues the prompts by ``new`` tokens greedily and at temperature 1. Returns what the drafter was worth at each
    of the two, and how often a greedy draft was accepted at each depth, of those that were tested there."""
    decoder, worths, hits = SpeculativeDecoder(target, drafter, num_drafts, graph_bytes=0), [], list[float]()
    for temperature in TEMPERATURES:
        counts = []
        for first in range(0, len(prompts), AT_ONCE):
            some = [list(p) for p in prompts[first : first + AT_ONCE]]
            seeds = list(range(seed + first, seed + first + len(some)))
            done = decoder.generate(some, None, new, SamplingParams(temperature=temperature), seeds)
            if done.drafter_error is not None:
                raise RuntimeError(f"the head failed: {done.drafter_error}")
            counts.append(done.stats)
        total = Stats.total(counts, num_drafts)
        worths.append(Worth(temperature, total.alpha, total.tau))
        if temperature == 0:
            tested = zip(total.accepted_by_position, total.tested_by_position, strict=True)
            hits = [accepted / of for accepted, of in tested if of]
    return worths, hits
