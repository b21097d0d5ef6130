"""Trainings by commands that end soon: what no option shortens."""

from __future__ import annotations

import functools

import pytest
import specdec.training.distill
import specdec.training.train_heads  # noqa: F401  (what names the settings' class is imported before it is replaced)
from specdec.cli import own_texts
from specdec.training import settings


def shorten(monkeypatch: pytest.MonkeyPatch, texts: int = 16) -> None:
    """Targets write few and short texts of their own, and drafts are judged by 8 tokens of a text instead of 64."""
    for name, value in {"ROWS": 8, "NEW_TOKENS": 24, "LEAST": texts, "TRIED": 1}.items():
        monkeypatch.setattr(own_texts, name, value)
    monkeypatch.setattr(settings, "DistillSettings", functools.partial(settings.DistillSettings, new=8))
