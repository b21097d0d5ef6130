"""The command line takes the session's embedded pair; loading it anew would be a third of the time of these tests."""

from __future__ import annotations

import pytest
import torch
from specdec.models.load import loading


@pytest.fixture(autouse=True)
def pair_loaded_once(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    load = loading.load_embedded_pair

    def loaded(dtype: torch.dtype | str, device: str, **more: int | None):
        plain = (dtype, device, {*more.values()}) == (torch.float32, "cpu", {None})
        return pair if plain else load(dtype, device, **more)

    monkeypatch.setattr(loading, "load_embedded_pair", loaded)


@pytest.fixture(autouse=True)
def no_times_of_the_user(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``specdec advise --save`` once wrote on this machine would change K."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
