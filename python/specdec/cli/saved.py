"""The files of step times from which commands choose K: the user's own, then one that comes with the embedded pair."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..checks import read_as
from .models import EMBEDDED

if TYPE_CHECKING:
    from ..decoder import SpeculativeDecoder


def own_file() -> Path:
    """Where ``specdec advise --save`` writes: in the user's cache, of all models together."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "specdec" / "step_times.json"


def load(decoder: SpeculativeDecoder, target: str | None) -> bool:
    """Has the decoder, whose K adapts, take step times out of the first file that has any of its models. The K of a
    sampled text is then a function of that file and of the text. Returns whether there was one."""
    files = [own_file(), *([EMBEDDED / "step_times.json"] if target is None else [])]
    return any(read_as("costs", lambda path: decoder.load_costs(path, sampled=True), path) for path in files)
