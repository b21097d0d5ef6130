"""Room for the frames of Python's calls. CPython takes memory for them in pieces of 16 KiB, and gives each back as soon
as it is empty: calls that cross the end of a piece take one and give it back every time, a million times in a test of
Triton's interpreter, for two thirds of its time. A piece is as large as the frame that needs it, rounded up to a power
of two; so below a frame that asks for a little more than half of one there is room for all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

WORDS = 1 << 16  # half of a piece of 1 MiB, which is mapped and not touched


def with_room(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        return function(*arguments, **more)

    call.__code__ = call.__code__.replace(co_stacksize=WORDS)
    return call
