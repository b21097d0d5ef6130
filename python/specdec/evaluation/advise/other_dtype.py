"""Forwards in bfloat16 beside float32 on a CPU: which of the two is faster depends on its units, and on how many tokens
a forward has."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ...models.cached_model import CachedModel
from ...models.default_dtype import ROOM
from ...models.free_memory import free_memory
from ...models.supported import cached_model

WIDTHS = (1, 5)  # tokens: a plain step, and one that verifies four drafts
ROUNDS = 5  # after one that is not timed
_OTHER = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}

Forward = Callable[[CachedModel, int], object]


@dataclass(frozen=True)
class OtherDtype:
    """
    Attributes:
        dtype, other: the target's dtype and the one beside it, by name.
        seconds: of a forward by dtype and number of tokens.
    """

    dtype: str
    other: str
    seconds: dict[str, dict[int, float]]

    def words(self) -> str:
        one, several = WIDTHS
        shown = "; ".join(
            f"{name} {1e3 * s[one]:.1f} ms, {several} tokens {1e3 * s[several]:.1f} ms"
            for name, s in self.seconds.items()
        )
        own, other = self.seconds[self.dtype], self.seconds[self.other]
        if all(other[width] < 0.95 * own[width] for width in WIDTHS):
            return f"Dtype: {self.other} is faster (--dtype {self.other}). A forward over one token takes: {shown}."
        if all(own[width] < 0.95 * other[width] for width in WIDTHS):
            return f"Dtype: {self.dtype} is the faster one. A forward over one token takes: {shown}."
        return f"Dtype: {self.other} is not clearly faster. A forward over one token takes: {shown}."


def time_dtypes(
    model: PreTrainedModel, forward: Forward, clock: Callable[[], float] = time.perf_counter
) -> OtherDtype | None:
    """Times ``forward`` of the target, and of a copy in bfloat16 if it is in float32, or the other way round. None: it
    is not on a CPU, quantised, in another dtype, or the copy would not fit the memory.

    Args:
        forward: called with a model and a number of tokens.
    """
    other = _OTHER.get(model.dtype)
    if other is None or model.device.type != "cpu" or getattr(model.config, "quantization_config", None) is not None:
        return None
    size = sum(p.numel() for p in model.parameters())
    free = free_memory(model.device)
    if free is not None and free < ROOM * size * (model.dtype.itemsize + other.itemsize):
        return None
    models = {str(m.dtype).removeprefix("torch."): cached_model(m, "target") for m in (model, _copy(model, other))}
    taken: dict[str, dict[int, list[float]]] = {name: {width: [] for width in WIDTHS} for name in models}
    for i in range(ROUNDS + 1):
        for name, cached in models.items():  # in turns, so that whatever else the machine does slows both
            for width in WIDTHS:
                began = clock()
                forward(cached, width)
                if i:
                    taken[name][width].append(clock() - began)
    own, beside = models
    return OtherDtype(own, beside, {n: {w: statistics.median(s) for w, s in by.items()} for n, by in taken.items()})


def _copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    copied: Any = copy.deepcopy(model)
    return copied.to(dtype)
