"""Chooses how many tokens one prefill forward is fed: fewer, once memory has run out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from ...checks import read_count
from ..machine.free_memory import is_out_of_memory

T = TypeVar("T")


class PrefillChunk:
    """How many tokens a prefill forward is fed. Halved when memory runs out, and never increased again, because memory
    would run out again and each failure costs a forward.

    Args:
        size: the initial number of tokens, >= 1.
    """

    def __init__(self, size: int):
        self.size = read_count("prefill_chunk", size, 1)

    def run(self, feed: Callable[[int], T], columns: int, rows: int = 1) -> T:
        """Returns ``feed(n)`` for the largest n <= ``columns`` that ``size`` allows, halved each time memory runs out.
        ``feed`` may fail anywhere; a repeated call must write to the same places.

        Warns (RuntimeWarning) once a call with the old and the new ``size`` if it was halved.

        Args:
            columns: the columns that are left to feed, >= 1.
            rows: tokens of a column, which cannot be divided.

        Raises:
            Exception: any other error of ``feed``, or that memory ran out for a single column.
        """
        columns = before = max(min(self.size // rows, columns), 1)
        try:
            while (result := _tried(feed, columns)) is None:
                columns //= 2
                self.size = columns * rows
            return result[0]
        finally:
            if columns < before:
                told = f"{columns * rows} tokens a forward instead of {before * rows} from now on"
                warnings.warn(f"out of memory in prefill: {told}", RuntimeWarning, stacklevel=2)


def _tried(feed: Callable[[int], T], columns: int) -> tuple[T] | None:
    """Returns ``(feed(columns),)``, or None if memory ran out. The error is caught here and not in the caller, so that
    no traceback keeps the forward's tensors alive while the next one runs."""
    try:
        return (feed(columns),)
    except Exception as error:
        if columns == 1 or not is_out_of_memory(error):
            raise
        return None
