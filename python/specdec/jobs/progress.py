"""Shows on stderr how far a job is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .output import Totals

EVERY_SECONDS = 30.0  # between two lines


class Shown(Protocol):
    def update(self, totals: Totals, busy: float) -> None:
        """
        Args:
            totals: of all results so far.
            busy: the part of rows that were decoding, from 0 to 1, averaged over steps.
        """

    def close(self) -> None: ...


class Rates:
    """The speed of this process alone; ``totals`` count the results of earlier ones as well."""

    def __init__(self, prompts: int, totals: Totals, clock: Callable[[], float] = time.monotonic):
        self._prompts, self._began, self._clock = prompts, clock(), clock
        self._results, self._emitted = totals.results, totals.emitted

    def tokens_per_second(self, totals: Totals) -> float:
        seconds = self._clock() - self._began
        return (totals.emitted - self._emitted) / seconds if seconds else 0.0

    def seconds_left(self, totals: Totals) -> float | None:
        done = totals.results - self._results
        return (self._clock() - self._began) / done * (self._prompts - totals.results) if done else None


def describe(totals: Totals, rates: Rates, busy: float) -> str:
    speed = f"{rates.tokens_per_second(totals):.1f} tokens/s"
    return f"{speed}, acceptance rate {totals.acceptance_rate:.2f}, rows busy {busy:.0%}"


class Bar:
    def __init__(self, prompts: int, totals: Totals, console: Console | None = None):
        self._rates = Rates(prompts, totals)
        columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console or Console(stderr=True))
        self._task = self._progress.add_task("", total=prompts, completed=totals.results)
        self._progress.start()

    def update(self, totals: Totals, busy: float) -> None:
        shown = describe(totals, self._rates, busy)
        self._progress.update(self._task, completed=totals.results, description=shown)

    def close(self) -> None:
        self._progress.stop()


class Lines:
    def __init__(self, prompts: int, totals: Totals, clock: Callable[[], float] = time.monotonic):
        self._prompts, self._rates, self._clock = prompts, Rates(prompts, totals, clock), clock
        self._last = clock()

    def update(self, totals: Totals, busy: float) -> None:
        if self._clock() - self._last < EVERY_SECONDS:
            return
        self._last = self._clock()
        left = self._rates.seconds_left(totals)
        ahead = "" if left is None else f", {_duration(left)} left"
        shown = describe(totals, self._rates, busy)
        typer.echo(f"{totals.results} of {self._prompts} prompts, {shown}{ahead}", err=True)

    def close(self) -> None:
        pass


class Nothing:
    def update(self, totals: Totals, busy: float) -> None:
        pass

    def close(self) -> None:
        pass


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
