"""Ctrl-C and SIGTERM end a job between two results, and Ctrl-C an answer or a training between two steps: nothing that
was done is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """A signal ended the program. Like KeyboardInterrupt not an Exception, or code that guards against the faults of a
    drafter would catch it."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number  # the convention of shells


class Signals:
    """Inside the block SIGINT and SIGTERM raise :class:`Stopped` wherever the program is, except within ``held``."""

    def __init__(self) -> None:
        self._holding = False
        self._taken: int | None = None

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._take) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, a signal waits for the end of the block, so that a line is written whole. An earlier one whose
        exception was lost, as Python loses those of destructors, is raised there as well."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._taken is not None:
            raise Stopped(self._taken)

    def ignore(self) -> None:
        """Ignores signals from now on, because the program ends anyway."""
        self._holding = True

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._taken = number
        if not self._holding:
            raise Stopped(number)


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
