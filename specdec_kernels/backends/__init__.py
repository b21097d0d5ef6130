"""Which backend runs, and why another cannot. Python backends are imported when first asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..ops import handle
from ..types import Backend


class Operations(NamedTuple):
    """One backend's callables, with the signatures of ``ops.SCHEMAS``."""

    draft_step: Callable
    speculative_step: Callable


def unavailable(backend: str, device_type: str) -> str | None:
    """Why ``backend`` cannot run on tensors of this device type; None if it can."""
    match Backend(backend):
        case Backend.CPU:
            from . import native

            return f"it runs on CPU tensors, not {device_type}" if device_type != "cpu" else native.missing()
        case Backend.TRITON:
            return _triton_unavailable(device_type)
        case _:
            return None


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


@functools.cache
def operations(backend: str, device: torch.device) -> Operations:
    """The operations of ``backend`` for tensors on ``device``; ``auto`` takes the fastest that can run.

    Raises:
        ValueError: an unknown name.
        RuntimeError: an explicit choice that cannot run here, with the reason.
    """
    if backend not in Backend._value2member_map_:
        allowed = ", ".join(repr(str(b)) for b in Backend)
        raise ValueError(f"backend: got {backend!r}, allowed: {allowed}")
    if backend == Backend.AUTO:
        fastest = Backend.CPU if device.type == "cpu" else Backend.TRITON
        backend = fastest if unavailable(fastest, device.type) is None else Backend.REFERENCE
    elif (reason := unavailable(backend, device.type)) is not None:
        raise RuntimeError(f"backend {backend!r} cannot run here: {reason}")
    match backend:
        case Backend.REFERENCE:
            from . import reference  # noqa: F401  registers the operations

            suffix = "_reference"
        case Backend.TRITON:
            from . import triton  # noqa: F401

            suffix = "_triton"
        case _:
            suffix = ""
    return Operations(handle(f"draft_step{suffix}"), handle(f"speculative_step{suffix}"))
