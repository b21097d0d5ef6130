"""The command line takes a smaller embedded pair, loaded once: loading and forwards were most of these tests' time."""

from __future__ import annotations

import pytest
import torch
from specdec.models import loading
from specdec.training.starts import cut

LAYERS = 4
LOAD = loading.load_embedded_pair


@pytest.fixture(scope="session")
def pair(pair):
    """(target, draft, tokenizer): of the embedded target four layers, which write as well what commands are asked for,
    in a third of the time. Not to be changed."""
    target, draft, tokenizer = pair
    return cut(target, LAYERS).eval(), draft, tokenizer


@pytest.fixture(autouse=True)
def pair_loaded_once(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(dtype: torch.dtype | str, device: str, *, bits: int | None = None):
        return pair if (dtype, device, bits) == (torch.float32, "cpu", None) else LOAD(dtype, device, bits=bits)

    monkeypatch.setattr(loading, "load_embedded_pair", loaded)


@pytest.fixture
def whole_pair(pair_loaded_once, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line loads all of the embedded pair: for heads, which were trained for it, and other processes."""
    monkeypatch.setattr(loading, "load_embedded_pair", LOAD)


@pytest.fixture(autouse=True)
def no_times_of_the_user(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``specdec advise --save`` once wrote on this machine would change K."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
