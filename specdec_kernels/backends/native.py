"""Loads the compiled extensions. Their static initialisers register ``draft_step`` and ``speculative_step`` of ``ops``
for tensors on a CPU and on an NVIDIA GPU."""

from __future__ import annotations

import functools
import importlib

import torch


@functools.cache
def missing() -> str | None:
    """Why the native operations for CPU tensors are missing; None once they are loaded."""
    try:
        importlib.import_module("specdec_kernels._C")
    except ImportError as error:
        return f"the C++ extension is not built or does not load ({error}); reinstall with a C++ compiler"
    return None


@functools.cache
def missing_cuda() -> str | None:
    """The same for tensors on an NVIDIA GPU."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) has no CUDA"
    try:
        importlib.import_module("specdec_kernels._C_cuda")
    except ImportError as error:
        return f"the CUDA extension is not built or does not load ({error}); reinstall with nvcc"
    return None
