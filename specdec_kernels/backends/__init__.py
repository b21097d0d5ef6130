"""Chooses the backend of an operation, and says why one cannot run. Python backends are imported on first use."""

from __future__ import annotations

import functools

import torch
from torch.compiler import is_compiling

from ..forks import survive_forks
from ..ops import handle
from ..types import Backend

# The operations that it has; Triton has the others as well.
OF_CUDA = ("draft_step", "speculative_step")


def unavailable(backend: str, device_type: str) -> str | None:
    """Why ``backend`` cannot run on tensors of this device type; None if it can."""
    match Backend(backend):
        case Backend.CPU:
            from . import native

            return f"it runs on CPU tensors, not {device_type}" if device_type != "cpu" else native.missing()
        case Backend.CUDA:
            from . import native

            return f"it runs on NVIDIA GPUs, not on {device_type}" if device_type != "cuda" else native.missing_cuda()
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


def operation(stem: str, backend: str, device_type: str) -> torch._ops.OpOverload:
    """The callable of an operation of ``ops``; ``auto`` takes the fastest backend that has it and can run.

    Raises:
        ValueError: an unknown name.
        RuntimeError: an explicit choice that cannot run here, with the reason.
    """
    return handle(_name(stem, backend, device_type)) if is_compiling() else _loaded(stem, backend, device_type)


def _name(stem: str, backend: str, device_type: str) -> str:
    return _loaded(stem, backend, device_type).name().partition("::")[2]


# torch.compile must not trace it, since it imports and reads what is installed. torch.compiler.assume_constant_result
# does no more than this, but as a decorator it would import torch._dynamo, and with it Triton, with this package.
vars(_name)["_dynamo_marked_constant"] = True


@functools.cache
def _loaded(stem: str, backend: str, device_type: str) -> torch._ops.OpOverload:
    return handle(stem + _suffix(stem, backend, device_type))


def _suffix(stem: str, backend: str, device_type: str) -> str:
    """The suffix that this backend's operations have in ``ops``. Registers them, if Python implements them."""
    if backend not in Backend._value2member_map_:
        allowed = ", ".join(repr(str(b)) for b in Backend)
        raise ValueError(f"backend: got {backend!r}, allowed: {allowed}")
    if backend == Backend.AUTO:
        fastest: tuple[Backend, ...] = (Backend.CPU,) if device_type == "cpu" else (Backend.CUDA, Backend.TRITON)
        fastest = tuple(b for b in fastest if b != Backend.CUDA or stem in OF_CUDA)
        backend = next((b for b in fastest if unavailable(b, device_type) is None), Backend.REFERENCE)
    elif backend == Backend.CUDA and stem not in OF_CUDA:
        raise RuntimeError(f"backend 'cuda' has no {stem}, only {', '.join(OF_CUDA)}; use 'triton' or 'auto'")
    if (reason := unavailable(backend, device_type)) is not None:
        raise RuntimeError(f"backend {backend!r} cannot run here: {reason}")
    match backend:
        case Backend.REFERENCE:
            survive_forks()
            from . import reference, reference_rows, reference_tree  # noqa: F401  register the operations

            return "_reference"
        case Backend.TRITON:
            from . import triton  # noqa: F401

            return "_triton"
        case _:
            return ""
