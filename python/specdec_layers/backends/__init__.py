"""Finds a backend's operation, and says why a backend cannot run. Python backends are imported on first use."""

from __future__ import annotations

import enum
import functools
from typing import NoReturn

import torch
from torch.compiler import is_compiling

from ..forks import survive_forks
from ..ops import handle
from . import native


class Backend(enum.StrEnum):
    """Where an operation runs. ``auto`` takes the native or Triton's kernels of the tensors' device, or the reference
    where there are none; an explicit choice never falls back."""

    AUTO = "auto"
    REFERENCE = "reference"
    CPU = "cpu"
    TRITON = "triton"
    CUDA = "cuda"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ValueError(f"backend: got {value!r}, allowed: {', '.join(repr(str(backend)) for backend in cls)}")


OF_CUDA = ("linear", "norm_linear", "add_linear")  # what it has; Triton has the others on a GPU
# Of the names of Python's operations in ``ops``.
_SUFFIXES = {Backend.REFERENCE: "_reference", Backend.TRITON: "_triton"}


def unavailable(backend: str, device_type: str) -> str | None:
    """Why ``backend`` cannot run on tensors of this device type; None if it can."""
    match Backend(backend):
        case Backend.CPU:
            return native.missing() if device_type == "cpu" else f"it runs on CPU tensors, not {device_type}"
        case Backend.CUDA:
            return native.missing_cuda() if device_type == "cuda" else f"it runs on NVIDIA GPUs, not on {device_type}"
        case Backend.TRITON:
            return _triton_unavailable(device_type)
        case _:
            return "tensors on meta have no numbers" if device_type == "meta" else None


def _triton_unavailable(device_type: str) -> str | None:
    try:
        import triton
    except ImportError as error:
        return f"triton cannot be imported ({error}); pip install 'triton>=3.6' (Linux)"
    if device_type == "cpu" and not triton.knobs.runtime.interpret:
        return "it runs on GPU tensors; on CPU tensors only in Triton's interpreter (TRITON_INTERPRET=1)"
    if device_type not in ("cpu", "cuda"):
        return f"it runs on NVIDIA and AMD GPUs (device type cuda), not on {device_type}"
    return None


def runs(backend: str, device_type: str) -> bool:
    """Whether ``backend`` can run on tensors of this device type."""
    return unavailable(backend, device_type) is None


def operation(stem: str, backend: str, device_type: str) -> torch._ops.OpOverload:
    """The callable of an operation of ``ops`` by a backend, which is not ``auto``.

    Raises:
        ValueError: an unknown name.
        RuntimeError: this backend cannot run here, or does not have it.
    """
    return handle(_name(stem, backend, device_type)) if is_compiling() else _loaded(stem, backend, device_type)


def _name(stem: str, backend: str, device_type: str) -> str:
    return _loaded(stem, backend, device_type).name().partition("::")[2]


# torch.compile must not trace them, since they import and read what is installed. What
# torch.compiler.assume_constant_result does is no more than this, but as a decorator it would import torch._dynamo, and
# with it Triton, with this package.
for _function in (runs, _name):
    vars(_function)["_dynamo_marked_constant"] = True


@functools.cache
def _loaded(stem: str, backend: str, device_type: str) -> torch._ops.OpOverload:
    if backend == Backend.CUDA and stem not in OF_CUDA:
        raise RuntimeError(f"backend 'cuda' has no {stem}, only {', '.join(OF_CUDA)}; use 'triton' or 'auto'")
    if (reason := unavailable(backend, device_type)) is not None:
        raise RuntimeError(f"backend {backend!r} cannot run here: {reason}")
    if backend == Backend.REFERENCE:
        survive_forks()
        from . import reference_attend, reference_linear, reference_recurrent  # noqa: F401  register the operations
    elif backend == Backend.TRITON:
        from . import triton  # noqa: F401
    try:
        return handle(stem + _SUFFIXES.get(Backend(backend), ""))
    except AttributeError:
        raise RuntimeError(f"backend {backend!r} has no {stem}") from None
