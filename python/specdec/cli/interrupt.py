"""Ctrl-C ends what is running after its step, so that nothing is lost that was done."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_once() -> Iterator[Callable[[], bool]]:
    """Inside the block, the first Ctrl-C asks to stop after the step: what this yields then returns True. A second one
    raises KeyboardInterrupt at once."""
    pressed: list[int] = []

    def press(number: int, frame: object) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
