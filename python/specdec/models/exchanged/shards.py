"""Models whose weights are in shards over several processes: what is seen of a weight."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .copied_modules import with_modules


def is_shard(weight: torch.Tensor) -> bool:
    """Whether it is one rank's part of a weight, a ``DTensor``, of which nothing is imported here."""
    return type(weight).__module__.startswith("torch.distributed.")


def has_shards(model: nn.Module) -> bool:
    return any(map(is_shard, model.parameters()))


def with_whole_ends(model: PreTrainedModel) -> PreTrainedModel:
    """Returns ``model`` with whole weights in its embedding and its head, so that these can be used on one rank alone.
    All ranks have to call it. The model is not changed."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    whole: dict[int, nn.Parameter] = {}  # the two may share their weights

    def gathered(weight: Any) -> nn.Parameter:
        if not is_shard(weight):
            return weight
        if id(weight) not in whole:
            whole[id(weight)] = nn.Parameter(weight.full_tensor(), requires_grad=False)
        return whole[id(weight)]

    def other(module: nn.Module) -> nn.Module | None:
        if all(module is not end for end in ends):
            return None
        copied = copy.copy(module)
        vars(copied).pop("forward", None)  # it would work on the original's shards
        copied._parameters = {name: p if p is None else gathered(p) for name, p in module._parameters.items()}
        return copied

    return with_modules(model, other)
