"""Medusa (arXiv 2401.10774, section 2.1): each head guesses one later token from the final state alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...drafters.heads.medusa import Medusa
from ...models.forward.cached_model import CachedModel
from .learner import DECAY, Files, Learner, Lesson, agreement, loss_between, output_rows


class MedusaLearner(Learner):
    """Every head begins as the target's own output matrix, after a block that changes nothing.

    Args:
        depth: the number of heads.
    """

    kind = "medusa"

    def __init__(self, target: CachedModel, loss: Mapping[str, float], depth: int):
        hidden, vocab_size = target.config.hidden_size, target.vocab_size
        self.medusa = Medusa((target.config.num_hidden_layers,), hidden, vocab_size, depth, 1)
        super().__init__(self.medusa, target, loss)
        rows = output_rows(target, torch.arange(vocab_size))
        for name, weight in self.medusa.named_parameters():
            if ".linear." in name:
                nn.init.zeros_(weight)
            else:
                weight.data.copy_(rows)

    def learn(self, lesson: Lesson, chance: torch.Generator) -> tuple[torch.Tensor, list[float]]:
        """Head i reads the state of token t, and guesses token t + 2 + i."""
        total, hits = lesson.states.new_zeros(()), []
        for i, head in enumerate(self.medusa.medusa_head):
            ours, log_p = head(lesson.states[:, : -1 - i]), lesson.log_p[:, 1 + i :]
            total = total + DECAY**i * loss_between(self.loss, ours, log_p)
            hits.append(agreement(ours, log_p))
        return total, hits

    def published(self, name: str) -> Files:
        config = {
            "medusa_num_heads": len(self.medusa.medusa_head),
            "medusa_num_layers": 1,
            "base_model_name_or_path": name,
        }
        return config, {key.removeprefix("medusa_head."): tensor for key, tensor in self.tensors.items()}
