"""What a process holds while it decodes on and on: resident bytes, live tensors, and where the large ones are."""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

LARGE = 1 << 16  # bytes of a tensor's storage that is weights or a cache


class Sample(NamedTuple):
    tokens: int  # generated so far
    resident: int  # bytes of this process in memory
    tensors: int  # live ones
    allocated: int  # bytes on the GPU; 0 without one


def live_tensors() -> list[torch.Tensor]:
    kinds = {torch.Tensor, torch.nn.Parameter}  # isinstance takes a second for the objects of a process
    return [o for o in gc.get_objects() if type(o) in kinds]


def sample(tokens: int) -> Sample:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    allocated = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    return Sample(tokens, resident, len(live_tensors()), allocated)


def large_storages() -> dict[int, int]:
    """{address: bytes} of weights, caches, and whatever else is as large."""
    storages = (t.untyped_storage() for t in live_tensors() if t.device.type != "meta")
    return {s.data_ptr(): s.nbytes() for s in storages if s.nbytes() >= LARGE}


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the least-squares line; 0 where all x are the same."""
    return statistics.linear_regression(x, y).slope if len({*x}) > 1 else 0.0


def growth(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """By what is sampled: the medians of the first and the last quarter of the samples, and the slope, a token."""
    quarter = max(len(samples) // 4, 1)
    found = {}
    for name in ("resident", "tensors", "allocated"):
        values = [getattr(s, name) for s in samples]
        found[name] = {
            "first_quarter": statistics.median(values[:quarter]),
            "last_quarter": statistics.median(values[-quarter:]),
            "slope": slope([s.tokens for s in samples], values),
        }
    return found
