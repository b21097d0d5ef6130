"""K of each step as a test wants it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import specdec.decoder
from specdec.loop.draft_length import DraftLength


class ScriptedK(DraftLength):
    """Takes these K, one after another."""

    def __init__(self, most: int, script: Iterable[int]):
        super().__init__(most, most)
        self._script = iter(script)

    def chooses(self, text_depends: bool) -> bool:
        return True

    def choose(self, rows: int, live: int, caps: Sequence[int]) -> int:
        return next(self._script)


def script_k(monkeypatch: pytest.MonkeyPatch, script: Iterable[int]) -> None:
    """Decoders that are made from now on, with a fixed number of drafts, take these K instead."""
    monkeypatch.setattr(specdec.decoder, "FixedK", lambda most: ScriptedK(most, script))
