"""What was built, and what can run on this machine."""

from __future__ import annotations

import importlib
import platform
import sys
from importlib import metadata

import torch

from .backends import native, unavailable
from .types import Backend


def build_info() -> dict[str, object]:
    """What was built, and which backends run on this machine.

    Returns a dictionary: ``version``, ``python``, ``platform``, ``torch``, ``triton`` (its version or None),
    ``cuda_device`` (its name or None), ``native`` (the extension's compiler, its ABI target, the ``instruction_set``
    that its operations use and ``instruction_sets``, those that this machine has, from the plainest to the best; or
    {"missing": reason}), ``native_cuda`` (likewise: the CUDA runtime and the architectures that it was built for),
    ``backends``: a list of {"backend": name, "device": "cpu" or "cuda", "available": bool, "reason": why it cannot run,
    or None}.

    Raises:
        ValueError: SPECDEC_CPU_ISA names an instruction set that this machine lacks.
    """
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    backends = [
        {
            "backend": str(b),
            "device": d,
            "available": (why := unavailable(b, d)) is None,
            "reason": why,
        }
        for b in Backend
        if b != Backend.AUTO
        for d in devices
    ]
    return {
        "version": _version("specdec-kernels"),
        "python": sys.version.split()[0],
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda_device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "native": _native(),
        "native_cuda": _built("_C_cuda", native.missing_cuda()),
        "backends": backends,
    }


def _native() -> dict[str, object]:
    built: dict[str, object] = dict(_built("_C", native.missing()))
    if "missing" not in built:
        built["instruction_sets"] = importlib.import_module("._C", __package__).instruction_sets()
    return built


def _built(extension: str, missing: str | None) -> dict[str, str]:
    if missing is not None:
        return {"missing": missing}
    return native.described(extension)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
