"""Ctrl-C and SIGTERM end a job between two results, not within one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """By a signal, as KeyboardInterrupt is: no Exception, which what guards against faults would take for one."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number  # as a shell tells it


class Signals:
    """SIGINT and SIGTERM raise :class:`Stopped` inside the block, wherever the program is, but where it is ``held``."""

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
        """Inside, a signal waits for the end of the block, so that a line is written whole. One that was lost before,
        as Python loses exceptions in destructors, is raised there as well."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._taken is not None:
            raise Stopped(self._taken)

    def ignore(self) -> None:
        """From now on: the program ends anyway."""
        self._holding = True

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._taken = number
        if not self._holding:
            raise Stopped(number)
