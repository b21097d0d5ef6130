"""A version of transformers that nobody tried is warned of once, and is no error."""

from __future__ import annotations

import warnings

import pytest
from specdec.models import supported
from support.models import tiny_model


@pytest.mark.parametrize(("version", "warns"), [("5.17.0", 0), ("5.24.3", 0), ("5.25.0.dev0", 1), ("6.0.0", 1)])
def test_newer_versions_are_warned_of_once(monkeypatch, version, warns):
    monkeypatch.setattr(supported.transformers, "__version__", version)
    supported.warn_if_untested.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            supported.cached_model(tiny_model("llama"), "target")
    supported.warn_if_untested.cache_clear()
    said = [str(w.message) for w in caught if "newer than" in str(w.message)]
    assert len(said) == warns
    assert all(version in words and "5.24" in words for words in said)
