"""Loads the compiled extension, which implements ``draft_step`` and ``speculative_step`` of ``ops`` for CPU tensors."""

from __future__ import annotations

import functools


@functools.cache
def missing() -> str | None:
    """Why the native operations are not there; None once they are loaded."""
    try:
        from .. import _C  # noqa: F401  its static initialisers register the operations
    except ImportError as error:
        return f"the C++ extension is not built or does not load ({error}); reinstall with a C++ compiler"
    return None
