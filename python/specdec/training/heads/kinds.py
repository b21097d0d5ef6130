"""The kinds of heads by name."""

from __future__ import annotations

import torch

from ...drafters.heads.layer_ids import resolve
from ...models.cached_model import CachedModel
from ..head_settings import HeadSettings
from .dflash import DflashLearner
from .eagle3 import Eagle3Learner
from .learner import Learner
from .medusa import MedusaLearner
from .mtp import MtpLearner


def new_learner(settings: HeadSettings, target: CachedModel, counts: torch.Tensor, pad: int | None) -> Learner:
    """Returns a head that has learned nothing yet. What is random comes from torch's generator.

    Args:
        counts: [V] int64: how often the data has each token.
        pad: the tokenizer's padding token.

    Raises:
        ValueError: names the setting, or what of the target such a head cannot have.
    """
    loss, depth = settings.run.train.loss, settings.depth
    if settings.kind == "medusa":
        return MedusaLearner(target, loss, depth)
    if settings.kind == "mtp":
        return MtpLearner(target, loss, depth)
    block = settings.dflash_layers if settings.kind == "dflash" else None
    states = resolve({}, target.config.num_hidden_layers, settings.layer_ids, block).states
    if block is None:
        return Eagle3Learner(target, loss, depth, states, most_frequent(counts, settings.kept_tokens))
    return DflashLearner(target, loss, depth, block, states, mask_token(counts, pad))


def most_frequent(counts: torch.Tensor, most: int) -> torch.Tensor | None:
    """Returns the ``most`` most frequent tokens in ascending order; None: all of them. Of equally frequent ones the
    lower are taken."""
    if most >= len(counts):
        return None
    return counts.argsort(descending=True, stable=True)[:most].sort().values


def mask_token(counts: torch.Tensor, pad: int | None) -> int:
    """Returns a token that no text has, or the rarest one: the padding, if it is among these."""
    if pad is not None and pad < len(counts) and counts[pad] == counts.min():
        return pad
    return int(counts.argmin())
