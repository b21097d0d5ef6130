"""Refuses models whose modules would drop out what they compute."""

from __future__ import annotations

import torch
from torch import nn


def check_evaluating(model: nn.Module, name: str) -> None:
    """Raises ValueError naming ``name`` if a module of ``model`` is in training mode, such as an adapter that was added
    to a model in evaluation mode. A linear or embedding layer does not behave differently there."""
    for module in model.modules():
        if module.training and not isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            given = "" if module is model else f"{type(module).__name__} "
            raise ValueError(f"{name}: {given}is in training mode (dropout), call .eval() first")
