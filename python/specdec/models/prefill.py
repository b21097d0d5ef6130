"""Prompts are read in chunks, and in smaller ones once memory has run out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from ..checks import read_count

T = TypeVar("T")

# What RuntimeErrors say that are not torch.OutOfMemoryError: the CPU's allocator; CUDA, cuBLAS and cuDNN, which
# allocate beside torch's.
_EXHAUSTED = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on a CPU; nothing else is wrong then, and less may do."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _EXHAUSTED)


class PrefillChunk:
    """How many tokens a forward of a prefill is fed. Halved where memory runs out, and never raised again: what ran out
    once would do so again, and every time costs a forward.

    Args:
        size: tokens, >= 1, to begin with.
    """

    def __init__(self, size: int):
        self.size = read_count("prefill_chunk", size, 1)

    def run(self, feed: Callable[[int], T], columns: int, rows: int = 1) -> T:
        """``feed(columns)``, or fewer: as many as ``size`` allows, and half of them as often as memory runs out. It may
        be interrupted anywhere: it is to write where it has written before when it is called again.

        Warns (RuntimeWarning), once a call, from what to what ``size`` fell.

        Args:
            columns: that there are, >= 1.
            rows: tokens of a column, which cannot be cut.

        Raises:
            Exception: of ``feed``; of memory running out for a single column.
        """
        columns = before = max(min(self.size // rows, columns), 1)
        try:
            while (result := _tried(feed, columns)) is None:
                columns //= 2
                self.size = columns * rows
            return result[0]
        finally:
            if columns < before:
                told = f"{columns * rows} tokens a forward in the place of {before * rows} from now on"
                warnings.warn(f"out of memory in prefill: {told}", RuntimeWarning, stacklevel=2)


def _tried(feed: Callable[[int], T], columns: int) -> tuple[T] | None:
    """None: memory ran out. Returned and not caught further out, so that no traceback keeps the forward's tensors while
    the next one runs."""
    try:
        return (feed(columns),)
    except Exception as error:
        if columns == 1 or not is_out_of_memory(error):
            raise
        return None
