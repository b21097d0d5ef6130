"""Loads the compiled extensions. Their static initialisers register ``draft_step`` and ``speculative_step`` of ``ops``
for tensors on a CPU and on an NVIDIA GPU."""

from __future__ import annotations

import functools
import importlib
import os

import torch

INSTRUCTION_SET = "SPECDEC_CPU_ISA"  # the environment variable that chooses one; unset: the best that the machine has


@functools.cache
def missing() -> str | None:
    """Why the native operations for CPU tensors are missing; None once they are loaded.

    Raises:
        ValueError: SPECDEC_CPU_ISA names an instruction set that does not exist, or that this machine lacks.
    """
    try:
        extension = importlib.import_module("specdec_kernels._C")
    except ImportError as error:
        return f"the C++ extension is not built or does not load ({error}); reinstall with a C++ compiler"
    if asked := os.environ.get(INSTRUCTION_SET):
        has = extension.instruction_sets()
        if asked not in has:
            raise ValueError(f"{INSTRUCTION_SET}: got {asked!r}, allowed on this machine: {', '.join(has)}")
        extension.use_instruction_set(asked)
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
