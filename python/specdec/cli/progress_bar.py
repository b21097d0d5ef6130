"""Shows on stderr how far a command is: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

EVERY_SECONDS = 5.0  # between two lines


class Show(Protocol):
    def __call__(self, done: int, total: int, what: str) -> None:
        """
        Args:
            done: of ``total`` parts of the work. Those of the first call are not this command's work.
            what: the part that is done now, or how it goes.
        """


@contextmanager
def progress(first: str, asked: bool = True) -> Iterator[Show]:
    """Shows the progress of the block, which is told by calling what this yields.

    Args:
        first: what is done before the first call.
        asked: False shows nothing.
    """
    if not asked:
        yield lambda done, total, what: None
    elif sys.stderr.isatty():
        with _bar(first) as show:
            yield show
    else:
        lines = Lines(first)
        with lines.every(EVERY_SECONDS):
            yield lines.update


@contextmanager
def _bar(first: str) -> Iterator[Show]:
    """It is gone when the block ends, before results are printed."""
    # Slow to import, and --help is to be fast.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    columns = (
        BarColumn(10),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
    )
    with Progress(
        *columns,
        console=Console(stderr=True),
        speed_estimate_period=3600,  # rich's 30 seconds can be shorter than one part
        redirect_stdout=False,  # results may be printed meanwhile
        transient=True,
        expand=True,
    ) as bar:
        task = bar.add_task(first, total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield show


class Lines:
    """Lines of the last call, how long it has taken, and how long the rest takes at the speed so far."""

    def __init__(self, first: str, clock: Callable[[], float] = time.monotonic):
        self._clock, self._began = clock, clock()
        self._last: tuple[int, int, str] | None = None
        self._what, self._before = first, 0

    def update(self, done: int, total: int, what: str) -> None:
        if self._last is None:
            self._began, self._before = self._clock(), done
        self._last = (done, total, what)

    def line(self) -> str:
        seconds = self._clock() - self._began
        if self._last is None:
            return f"{self._what}, {duration(seconds)}"
        done, total, what = self._last
        new = done - self._before
        left = f", {duration(seconds / new * (total - done))} left" if new else ""
        return f"{done} of {total} in {duration(seconds)}{left}: {what}"

    @contextmanager
    def every(self, seconds: float) -> Iterator[None]:
        """Prints a line so often, by a thread: also while the work says nothing."""
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(seconds):
                print(self.line(), file=sys.stderr, flush=True)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def duration(seconds: float) -> str:
    """As h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
