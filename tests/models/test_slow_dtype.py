"""A dtype in which the CPU is slow is said once, by what a measurement says and not by the CPU's name."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from specdec import SpeculativeDecoder, speculate
from specdec.models.exchanged import slow_dtype
from support.models import tiny_model


@pytest.fixture(autouse=True)
def _nothing_said_yet():
    slow_dtype._SAID.clear()
    yield
    slow_dtype._SAID.clear()


def bfloat16_model():
    return copy.deepcopy(tiny_model("llama")).bfloat16()


def warned(make) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]


def test_the_decoder_says_once_what_helps(monkeypatch):
    monkeypatch.setattr(slow_dtype, "slowdown", lambda dtype: 3.0)
    (said,) = warned(lambda: SpeculativeDecoder(bfloat16_model(), bfloat16_model()))
    assert said.startswith(
        "target: computes in bfloat16, in which a step's products take 3.0 times as long as in float32"
    )
    assert "dtype=torch.float32" in said and "specdec.load_model" in said
    assert warned(lambda: SpeculativeDecoder(bfloat16_model())) == []


def test_speculate_says_it(monkeypatch):
    monkeypatch.setattr(slow_dtype, "slowdown", lambda dtype: 3.0)
    model, prompt = bfloat16_model(), torch.tensor([[1, 2, 3]])
    (said,) = warned(lambda: model.generate(prompt, max_new_tokens=2, custom_generate=speculate()))
    assert said.startswith("target: computes in bfloat16")


def test_a_fast_dtype_and_float32_are_not_spoken_of(monkeypatch):
    monkeypatch.setattr(slow_dtype, "slowdown", lambda dtype: 1.1)
    assert warned(lambda: SpeculativeDecoder(bfloat16_model())) == []
    monkeypatch.setattr(slow_dtype, "slowdown", lambda dtype: 9.0)
    assert warned(lambda: SpeculativeDecoder(tiny_model("llama"))) == []
    assert slow_dtype.slow_words(torch.bfloat16, torch.device("cuda")) is None


def test_the_measurement_is_of_this_machine():
    assert 0.05 < slow_dtype.slowdown(torch.bfloat16) < 500
