"""Loads the compiled extensions. Their static initialisers register the operations of ``ops`` for tensors on a CPU and
on an NVIDIA GPU."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import torch

from ..forks import survive_forks

INSTRUCTION_SET = "SPECDEC_CPU_ISA"  # the environment variable that chooses one; unset: the best that the machine has


@functools.cache
def missing() -> str | None:
    """Why the native operations for CPU tensors are missing; None once they are loaded.

    Raises:
        ValueError: SPECDEC_CPU_ISA names an instruction set that does not exist, or that this machine lacks.
    """
    survive_forks()
    try:
        extension = importlib.import_module("specdec_layers._C")
    except ImportError as error:
        return f"the C++ extension of layers is not built or does not load ({error}); reinstall with a C++ compiler"
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
        extension = importlib.import_module("specdec_layers._C_cuda")
    except ImportError as error:
        return f"the CUDA extension of layers is not built or does not load ({error}); reinstall with nvcc"
    architectures = described(extension)["architectures"]
    found = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    if found and not any(serves(architectures, capability) for capability in found):
        here = ", ".join(f"{major}.{minor}" for major, minor in found)
        return (
            f"the CUDA extension was built for compute capability {architectures.replace(':', ', ')}, and this machine "
            f"has {here}; reinstall with TORCH_CUDA_ARCH_LIST set to it, 8.0 or newer"
        )
    return None


def described(extension: Any) -> dict[str, Any]:
    """What a loaded extension says of itself."""
    return dict(part.split("=", 1) for part in extension.build().split(";"))


def serves(architectures: str, capability: tuple[int, int]) -> bool:
    """Whether kernels that were built for these architectures run on a GPU of this compute capability.

    Args:
        architectures: as TORCH_CUDA_ARCH_LIST has them, separated by colons: "8.0:9.0a:10.0+PTX". Machine code runs on
            the same major and no lesser minor version, PTX on all later ones, and what has a letter on that one alone.
    """
    for name in architectures.split(":"):
        version = name.removesuffix("+PTX")
        exact = not version[-1].isdigit()
        built = tuple(map(int, version.rstrip("af").split(".")))
        later = capability > built and (name != version or capability[0] == built[0])
        if capability == built or (later and not exact):
            return True
    return False
