"""What can be asked of a model together: dtype, bits, adapter, processes and device, as one table of refusals."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...checks import refuse
from ..exchanged.linear import has_native
from ..exchanged.product import DTYPES, has_kernel
from .few_bits import PACKINGS, Bits, is_cpu
from .location import Location
from .saved_model import SavedModel


@dataclass(frozen=True)
class Plan:
    """How a model is loaded, as ``load_model`` is asked for it.

    Attributes:
        dtype: None: the one in which the weights were saved.
    """

    dtype: torch.dtype | None
    device: torch.device
    adapter: Location | None = None
    bits: Bits | None = None
    tp: int | None = None

    @property
    def on_cpu(self) -> bool:
        return is_cpu(self.device)

    @property
    def rounds(self) -> bool:
        """Whether it is ours that rounds to so many bits; else it is bitsandbytes, or nobody."""
        return self.bits is not None and (self.on_cpu or (self.bits == 8 and has_kernel()))

    def check(self, saved: SavedModel) -> None:
        """Raises ValueError naming what does not go with the model, or with the rest of the plan."""
        for wrong, name, given, allowed in self._refusals(saved):
            if wrong:
                refuse(name, given, allowed)

    def _refusals(self, saved: SavedModel) -> Iterator[tuple[bool, str, str, str]]:
        """Yields whether something is asked that cannot be, the argument's name, what was given and what is allowed."""
        bits, tp, on_cpu, dtype = self.bits, self.tp, self.on_cpu, str(self.dtype).removeprefix("torch.")
        if tp is not None:
            alone = "a folder or hub name alone with tp"
            yield self.adapter is not None, "adapter", f"{self.adapter} with tp={tp}", alone
            yield bits is not None, "bits", f"'{bits}' with tp={tp}", alone
            yield saved.file is not None, "path", f"{saved.at} with tp={tp}", alone
            yield saved.is_reduced, "tp", f"{tp} for a model with a reduced head", "None for it"
        if saved.file is not None:
            folder, of = f"the folder that this command writes of it: {saved.at.conversion}", "for a GGUF file"
            others = self.dtype not in (None, torch.float32)
            yield others, "dtype", f"{dtype} {of}, which computes in float32", f"auto, float32, or {folder}"
            yield not on_cpu, "device", f"'{self.device}' {of}", f"cpu, or {folder}"
            yield self.adapter is not None, "adapter", f"{self.adapter} {of}", f"none, or {folder}"
            yield bits is not None, "bits", f"{bits} {of}, whose weights stay as they are", f"none, or {folder}"
        if bits is None:
            return
        yield on_cpu and bits not in PACKINGS, "bits", f"{bits!r} on a CPU", "8 or None"
        yield bits not in (4, 8), "bits", str(bits), "4, 8 or None"
        if self.rounds and self.dtype is not None:
            computed = "auto or float32, in which packed weights are computed"
            yield on_cpu and self.dtype != torch.float32, "dtype", f"{dtype} with bits on a CPU", computed
            computed = "bfloat16 or float16, in which x and results are"
            yield not on_cpu and self.dtype not in DTYPES, "dtype", f"{dtype} with bits=8 on a GPU", computed
        quantised, absent = saved.quantisation is not None, importlib.util.find_spec("bitsandbytes") is None
        yield quantised, "bits", f"{bits} for weights that are quantised already", "None for them"
        yield on_cpu and not has_native(), "bits", f"{bits} on a CPU without native code", "None"
        by_others = not self.rounds and absent
        yield by_others, "bits", f"{bits} without bitsandbytes", "None, or: pip install bitsandbytes"


def read_dtype(given: torch.dtype | str) -> torch.dtype | None:
    """None for "auto". Raises ValueError naming ``dtype``."""
    if given == "auto":
        return None
    known = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
    for name, dtype in known.items():
        if given in (name, dtype):
            return dtype
    refuse("dtype", repr(given), f"auto, {', '.join(known)}")


def read_device(given: torch.device | str) -> torch.device:
    """Raises ValueError naming ``device``: it is not on this machine."""
    try:
        device = torch.device(given)
        if torch.empty(0, device=device).is_meta:
            raise RuntimeError("meta tensors have no values")
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without the device
        there_are = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise ValueError(f"device: got {str(given)!r}, allowed: {', '.join(there_are)}") from error
    return device
