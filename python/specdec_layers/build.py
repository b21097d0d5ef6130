"""What was built of the operations of layers."""

from __future__ import annotations

import importlib
from typing import Any

from .backends import native


def build_info() -> dict[str, dict[str, Any]]:
    """What was built, and loads on this machine.

    Returns ``native``: the C++ extension's compiler, its ABI target, the ``instruction_set`` that its operations use
    and ``instruction_sets``, those that this machine has, from the plainest to the best; and ``native_cuda``: the CUDA
    runtime and the architectures that the CUDA extension was built for. Either is {"missing": reason} if it does not
    serve here.

    Raises:
        ValueError: SPECDEC_CPU_ISA names an instruction set that this machine lacks.

    Example:
        >>> from specdec_layers import build_info
        >>> sorted(build_info())
        ['native', 'native_cuda']
    """
    built = {"native": _built("_C", native.missing()), "native_cuda": _built("_C_cuda", native.missing_cuda())}
    if "missing" not in built["native"]:
        built["native"]["instruction_sets"] = importlib.import_module("._C", __package__).instruction_sets()
    return built


def _built(extension: str, missing: str | None) -> dict[str, Any]:
    if missing is not None:
        return {"missing": missing}
    return native.described(importlib.import_module(f".{extension}", __package__))
