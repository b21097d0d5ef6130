"""Says once where a model computes in a dtype that this CPU is slow at, as transformers loads most models in the dtype
of their files, which is bfloat16."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable

import torch
from specdec_layers import Packing, linear
from torch.nn import functional as F

from .linear import has_native

_SIZE, _TOKENS, _ROUNDS = 1024, 5, 5  # of a layer, of a step with four drafts; the least time of so many counts
_WORTH_SAYING = 1.25
_SAID: set[torch.dtype] = set()


@functools.cache
def slowdown(dtype: torch.dtype) -> float:
    """Measures, for some milliseconds, how many times as long a layer of 1,024 numbers takes for the five tokens of a
    step in ``dtype`` as in float32, on this CPU with the threads that torch now has."""
    x, weight = torch.ones(1, _TOKENS, _SIZE), torch.ones(_SIZE, _SIZE)
    narrow_x, narrow = x.to(dtype), weight.to(dtype)
    with torch.inference_mode():
        wide = _least_seconds(lambda: linear(x, weight, None, Packing.NONE) if has_native() else F.linear(x, weight))
        return _least_seconds(lambda: F.linear(narrow_x, narrow)) / wide


def slow_words(dtype: torch.dtype, device: torch.device) -> str | None:
    """What there is to say of a model that computes in ``dtype`` on ``device``; None: nothing."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return None
    if (times := slowdown(dtype)) < _WORTH_SAYING:
        return None
    named = str(dtype).removeprefix("torch.")
    return (
        f"computes in {named}, in which a step's products take {times:.1f} times as long as in float32 on this CPU: "
        "load it with from_pretrained(..., dtype=torch.float32), or by specdec.load_model, which keeps the bytes of "
        "the file and computes in float32"
    )


def warn_if_slow(dtype: torch.dtype, device: torch.device, name: str) -> None:
    """Warns once a process and dtype. ``name``: the caller's argument."""
    if dtype not in _SAID and (words := slow_words(dtype, device)) is not None:
        _SAID.add(dtype)
        warnings.warn(f"{name}: {words}", RuntimeWarning, stacklevel=4)


def _least_seconds(run: Callable[[], torch.Tensor]) -> float:
    run()
    taken = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begun)
    return min(taken)
