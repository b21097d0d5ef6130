"""tools/api_reference.py, which is no module of a package: the checks of docstrings."""

from __future__ import annotations

import importlib.util

from . import ROOT

_SPEC = importlib.util.spec_from_file_location("api_reference", ROOT / "tools" / "api_reference.py")
assert _SPEC is not None and _SPEC.loader is not None
reference = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(reference)
