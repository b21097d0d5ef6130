"""The kinds of heads by name."""

from __future__ import annotations

import torch

from ...drafters.heads.layer_ids import resolve
from ...models.cached_model import CachedModel
from ...prompts import read_eos
from ..head_settings import HeadSettings
from ..vocabulary import most_frequent
from .dflash import DflashLearner
from .eagle3 import Eagle3Learner
from .learner import Learner
from .medusa import MedusaLearner
from .mtp import MtpLearner


def new_learner(settings: HeadSettings, target: CachedModel, blocks: torch.Tensor, pad: int | None) -> Learner:
    """Returns a head that has learned nothing yet. What is random comes from torch's generator.

    Args:
        blocks: [n, L] int64, the data.
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
    if block is not None:
        counts = torch.bincount(blocks.flatten(), minlength=target.vocab_size)
        return DflashLearner(target, loss, depth, block, states, mask_token(counts, pad))
    kept = None
    if settings.run.vocabulary:
        kept = most_frequent(blocks, target.vocab_size, settings.run.vocabulary, read_eos(None, target.model))
    return Eagle3Learner(target, loss, depth, states, kept)


def mask_token(counts: torch.Tensor, pad: int | None) -> int:
    """Returns a token that no text has, or the rarest one: the padding, if it is among these.

    Args:
        counts: [V] int64: how often the data has each token.
    """
    if pad is not None and pad < len(counts) and counts[pad] == counts.min():
        return pad
    return int(counts.argmin())
