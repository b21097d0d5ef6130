"""What there is to say about a job that runs."""

from __future__ import annotations

import time
from collections.abc import Callable

from .output import Totals


class Speed:
    """The speed of this process alone; ``totals`` count the results of earlier ones as well."""

    def __init__(self, totals: Totals, clock: Callable[[], float] = time.monotonic):
        self._began, self._clock, self._emitted = clock(), clock, totals.emitted

    def describe(self, totals: Totals, busy: float) -> str:
        """
        Args:
            totals: of all results so far.
            busy: the part of rows that were decoding, from 0 to 1, averaged over steps.
        """
        seconds = self._clock() - self._began
        speed = (totals.emitted - self._emitted) / seconds if seconds else 0.0
        return f"{speed:.1f} tokens/s, acceptance rate {totals.acceptance_rate:.2f}, rows busy {busy:.0%}"
