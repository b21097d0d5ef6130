"""Tensors of every form in every argument of an operation of layers: results are those of a plain copy, or there is an
error, PyTorch's own or one of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from specdec_layers import add_linear, add_rms_norm, attend, gated, linear, norm_linear, rms_norm, rotate
from support.forms import check_same_forms, other


def calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    torch.manual_seed(0)
    return {
        "linear": (linear, {"x": torch.randn(1, 2, 32), "weight": torch.randn(16, 32), "bias": torch.randn(16)}),
        "norm_linear": (
            norm_linear,
            {"x": torch.randn(1, 2, 32), "norm_weight": torch.randn(32), "epsilon": 1e-6,
             "weight": torch.randn(16, 32), "bias": torch.randn(16), "activation": "silu"},
        ),
        "add_linear": (
            add_linear,
            {"base": torch.randn(1, 2, 16), "x": torch.randn(1, 2, 32), "weight": torch.randn(16, 32),
             "bias": torch.randn(16)},
        ),
        "rms_norm": (rms_norm, {"x": torch.randn(1, 2, 32), "weight": torch.randn(32), "epsilon": 1e-6}),
        "add_rms_norm": (
            add_rms_norm,
            {"x": torch.randn(1, 2, 32), "delta": torch.randn(1, 2, 32), "weight": torch.randn(32), "epsilon": 1e-6,
             "delta_weight": torch.randn(32), "delta_epsilon": 1e-6},
        ),
        "rotate": (rotate, {name: torch.randn(1, 2, 32)[:, None] if name == "x" else torch.randn(1, 2, 32)
                            for name in ("x", "cos", "sin")}),
        "gated": (gated, {"gate": torch.randn(1, 2, 32), "up": torch.randn(1, 2, 32), "activation": "silu"}),
        "attend": (
            attend,
            {"q": torch.randn(1, 2, 3, 8), "k": torch.randn(1, 2, 5, 8), "v": torch.randn(1, 2, 5, 8),
             "seen": torch.tensor([[[0, 3], [0, 4], [0, 5]]])},
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls())
def test_forms_of_tensors(name):
    call, plain = calls()[name]
    for argument, value in plain.items():
        if not isinstance(value, torch.Tensor):
            continue
        check_same_forms(call, plain, argument)
        for form, tensor in other(value):
            with pytest.raises((ValueError, RuntimeError, AttributeError)):
                call(**{**plain, argument: tensor})
                raise AssertionError(f"{argument} as {form} was taken")
