"""The folders that tools/real_models.py writes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from . import ROOT


def tool() -> ModuleType:
    """tools/real_models.py, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("real_models", ROOT / "tools" / "real_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


def real_folder(name: str) -> Path:
    """The folder of a real model; skips the test where there is none."""
    folder: Path = tool().HOME / name
    if not folder.is_dir():
        pytest.skip(f"there is no {folder}: python tools/real_models.py {name}")
    return folder
