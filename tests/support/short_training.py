"""Trainings by commands that end soon: what no option shortens."""

from __future__ import annotations

import functools

import pytest
import specdec.training.distill
import specdec.training.train_heads  # noqa: F401  (what names the settings' class is imported before it is replaced)
from specdec.cli import own_texts
from specdec.training import settings


def shorten(monkeypatch: pytest.MonkeyPatch, texts: int = 16, new: int = 8) -> None:
    """Targets write so many short texts of their own, however fast they are, and drafts are judged by ``new`` tokens of
    a text."""
    for name, value in {"ROWS": 8, "NEW_TOKENS": 24, "LEAST": texts, "MOST": texts, "TRIED": 1}.items():
        monkeypatch.setattr(own_texts, name, value)
    monkeypatch.setattr(settings, "DistillSettings", functools.partial(settings.DistillSettings, new=new))
