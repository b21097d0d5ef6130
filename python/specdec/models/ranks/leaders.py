"""Who leads the other ranks of a model whose weights are in shards: known without torch.distributed."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

if TYPE_CHECKING:
    from .channel import Leader

# By model: who has the other ranks do the same, and the number under which they know the model.
_LED: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Leader, int]] = weakref.WeakKeyDictionary()


def lead(model: PreTrainedModel, leader: Leader, number: int) -> None:
    """Notes that other ranks have their shards of ``model``, which they know by this number."""
    _LED[model] = leader, number


def leader_of(model: PreTrainedModel) -> tuple[Leader, int] | None:
    """None: nobody follows the forwards of this model."""
    return _LED.get(model)
