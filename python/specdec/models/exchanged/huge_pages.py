"""Weights in pages of 2 MiB, on Linux.

A step reads every weight once. In pages of 4 KiB it has to look up where each page is, which on a virtual machine takes
about as long as reading it. The system gives pages of 2 MiB to memory that asks for them (``MADV_HUGEPAGE``).
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from .shards import is_shard

PAGE = 2 << 20
AT_ONCE = 128 * PAGE  # bytes of a mapping, at least: weights are moved one by one, and few are as large as a page
LEAST = 8 * PAGE  # bytes of all weights, below which the processor remembers where its pages are
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def has_huge_pages(setting: Path = SETTING) -> bool:
    """Whether the system gives them to memory that asks for them."""
    return hasattr(mmap, "MADV_HUGEPAGE") and setting.exists() and "[never]" not in setting.read_text()


def read_whole(model: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters of which every number is read in a step: not those of embeddings alone."""
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            yield from (parameter for parameter in module._parameters.values() if parameter is not None)


@torch.inference_mode(False)
@torch.no_grad()
def move_to_huge_pages(weights: Iterable[torch.Tensor]) -> int:
    """Moves weights on a CPU to memory in huge pages, if the system has them and it pays. They stay the same objects,
    with the same numbers; those that share memory, with each other or with other processes, stay where they are.

    Returns how many bytes were moved.
    """
    own = {id(weight): weight for weight in weights if not is_shard(weight) and _is_movable(weight)}
    sharing = Counter(weight.data_ptr() for weight in own.values())
    found = [weight for weight in own.values() if sharing[weight.data_ptr()] == 1]
    left = sum(map(_room, found))
    if left < LEAST or not has_huge_pages():
        return 0
    moved = used = 0
    memory: mmap.mmap | None = None
    for weight in found:
        if memory is None or used + _room(weight) > len(memory):
            used, size = 0, max(_room(weight), min(left, AT_ONCE))
            memory = mmap.mmap(-1, -(-size // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
        place = torch.frombuffer(memory, dtype=weight.dtype, count=weight.numel(), offset=used)
        weight.data = place.view(weight.shape).copy_(weight)
        weight.in_huge_pages = weight.data_ptr()  # type: ignore[attr-defined]
        used, left, moved = used + _room(weight), left - _room(weight), moved + weight.nbytes
    return moved


def _is_movable(weight: torch.Tensor) -> bool:
    """Whether the memory is its own, and not in huge pages already."""
    own = weight.device.type == "cpu" and weight.is_contiguous() and weight.numel() > 0 and not weight.is_shared()
    moved = getattr(weight, "in_huge_pages", None) == weight.data_ptr()
    return own and not moved and weight.untyped_storage().nbytes() == weight.nbytes


def _room(weight: torch.Tensor) -> int:
    """Its bytes, with what comes before the next one: none begins in the middle of a cache line."""
    return -(-weight.nbytes // 64) * 64
