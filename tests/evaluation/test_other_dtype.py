"""The other dtype that ``specdec advise`` times, by a clock that the test moves."""

from __future__ import annotations

import copy

import pytest
import torch
from specdec.evaluation.advise import other_dtype
from specdec.evaluation.advise.other_dtype import time_dtypes
from support.models import tiny_model


@pytest.mark.parametrize(
    ("one", "five", "said"),
    [
        (2.0, 2.0, "Dtype: float32 is the faster one."),
        (0.5, 0.9, "Dtype: bfloat16 is faster (--dtype bfloat16)."),
        (1.1, 0.8, "Dtype: bfloat16 is not clearly faster."),
    ],
)
def test_dtypes(one, five, said):
    """A forward takes 10 ms a token in float32, and these times as long in bfloat16."""
    now, model = [0.0], tiny_model("llama")

    def forward(cached, width):
        slower = {1: one, 5: five}[width] if cached.model.dtype == torch.bfloat16 else 1.0
        now[0] += 0.010 * width * slower

    found = time_dtypes(model, forward, lambda: now[0])
    shown = "A forward over one token takes: float32 10.0 ms, 5 tokens 50.0 ms; bfloat16 "
    assert found.words().startswith(f"{said} {shown}")
    assert found.seconds["bfloat16"] == pytest.approx({1: 0.010 * one, 5: 0.050 * five})
    assert model.dtype == torch.float32 and (found.dtype, found.other) == ("float32", "bfloat16")


def test_what_is_not_timed(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(other_dtype, "free_memory", lambda _: 1000)
    assert time_dtypes(model, lambda *_: pytest.fail("timed")) is None
    monkeypatch.setattr(other_dtype, "free_memory", lambda _: None)
    assert time_dtypes(copy.deepcopy(model).double(), lambda *_: pytest.fail("timed")) is None
