"""The instruction sets for which native code was compiled and that this machine has."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
from specdec_layers.backends import native

assert native.missing() is None
EXTENSION = importlib.import_module("specdec_layers._C")
SETS: list[str] = EXTENSION.instruction_sets()


@pytest.fixture(params=SETS)
def instruction_set(request) -> Iterator[str]:
    """Lets the operations use each of them in turn."""
    EXTENSION.use_instruction_set(request.param)
    yield request.param
    EXTENSION.use_instruction_set(SETS[-1])
