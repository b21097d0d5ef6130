"""Decoder layers that are exchanged, on a CPU."""

from __future__ import annotations

import copy
from typing import TypeVar

import pytest
import torch
from specdec.models import norms
from specdec.models.decoder_layers import NativeLayer, with_native_layers
from specdec.models.native_parts import with_native_parts
from torch import nn

M = TypeVar("M", bound=nn.Module)


def on_a_cpu(model: M) -> M:
    return with_native_layers(with_native_parts(model), "cpu")


def layers_of(model: nn.Module) -> list[NativeLayer]:
    return [module for module in model.modules() if isinstance(module, NativeLayer)]


def unhooked(model: M) -> M:
    """A copy without the hooks that transformers leaves in a model that was once asked for hidden states."""
    model = copy.deepcopy(model)
    for module in model.modules():
        module._forward_hooks.clear()
    return model


def noted_sums(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The sums and norms that are computed at once from now on."""
    made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def noted(*args, **kwargs):
        made.append(own(*args, **kwargs))
        return made[-1]

    own = norms.add_rms_norm
    monkeypatch.setattr(norms, "add_rms_norm", noted)
    return made
