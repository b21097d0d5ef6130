"""Loads the compiled extensions, which implement ``draft_step`` and ``speculative_step`` of ``ops`` for CPU tensors and
for those on an NVIDIA GPU."""

from __future__ import annotations

import functools

import torch


@functools.cache
def missing() -> str | None:
    """Why the native operations are not there; None once they are loaded."""
    try:
        from .. import _C  # noqa: F401  its static initialisers register the operations
    except ImportError as error:
        return f"the C++ extension is not built or does not load ({error}); reinstall with a C++ compiler"
    return None


@functools.cache
def missing_cuda() -> str | None:
    """The same for GPU tensors."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) has no CUDA"
    try:
        from .. import _C_cuda  # noqa: F401
    except ImportError as error:
        return f"the CUDA extension is not built or does not load ({error}); reinstall with nvcc"
    return None
