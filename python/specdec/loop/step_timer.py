"""Times a step on the device, without waiting for it."""

from __future__ import annotations

import time

import torch


class StepTimer:
    """Starts when it is made. On a GPU, two events enclose the step: the host reads them once it has the step's report,
    so it never waits for them. On a CPU a step has ended when its call returns."""

    def __init__(self, device: torch.device):
        self._seconds: float | None = None
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._counts = False
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()
        self._started = time.perf_counter()

    def stop(self, counts: bool = True) -> None:
        """Ends the step.

        Args:
            counts: False: the step did other work, too, so its time does not count.
        """
        self._counts = counts
        if self._events is not None:
            self._events[1].record()
        self._seconds = time.perf_counter() - self._started

    @property
    def seconds(self) -> float | None:
        """The time of a step whose report was read; None if it does not count."""
        if not self._counts or self._seconds is None:
            return None
        return self._seconds if self._events is None else self._events[0].elapsed_time(self._events[1]) * 1e-3
