"""Where the time of a generation goes: a trace of its first steps for Perfetto or chrome://tracing, and a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .layout import print_table
from .options import refuse
from .terminal import remark

if TYPE_CHECKING:
    from torch.profiler import profile

    from ..result import Emission

STEPS = 4  # that are recorded, with the prefill: a step of a small model is some thousand events already
ROWS = 15  # of the table


def check_trace(path: Path) -> None:
    """Refuses a file that cannot be written. To be called before models are loaded."""
    if not path.name.endswith(".json.gz"):
        refuse("--profile", repr(str(path)), "a name that ends in .json.gz")
    allowed = "a file in a folder that can be written to"
    if path.is_dir() or not path.parent.is_dir():
        refuse("--profile", f"{str(path)!r}, {'a folder' if path.is_dir() else 'in no folder'}", allowed)
    try:
        _new_file(path).unlink()
    except OSError as error:
        refuse("--profile", f"{str(path)!r} ({error.strerror})", allowed)


@contextmanager
def traced(path: Path | None) -> Iterator[Callable[[Emission], None] | None]:
    """Profiles the block up to the end of its step number STEPS. Then it writes the trace, as a whole or not at all,
    and prints the table to stderr.

    Yields:
        What the decoder has to call, as its ``on_emit``. None: ``path`` is None, and nothing is profiled.
    """
    if path is None:
        yield None
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    profiler = profile(activities=activities)
    steps = _Steps(profiler)
    profiler.start()
    try:
        yield steps.on_emit
    finally:
        steps.stop()
    part = _new_file(path)
    try:
        profiler.export_chrome_trace(str(part))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    _print_operations(profiler)
    remark(f"{steps.count} steps and the prefill are in {str(path)!r}, for ui.perfetto.dev", "dim")


class _Steps:
    """Counts steps by what they emit, and ends the recording after STEPS of them."""

    def __init__(self, profiler: profile):
        self._profiler, self._last, self._runs = profiler, -1, True
        self.count = 0

    def on_emit(self, emission: Emission) -> None:
        if emission.sequence <= self._last:  # the first of the next step: a step's come in the order of their numbers
            self._end_step()
        self._last = emission.sequence

    def stop(self) -> None:
        if self._runs and self._last >= 0:
            self._end_step()
        self._end()

    def _end_step(self) -> None:
        if self._runs:
            self.count += 1
        if self.count == STEPS:
            self._end()

    def _end(self) -> None:
        if self._runs:
            self._runs = False
            self._profiler.stop()


def _print_operations(profiler: profile) -> None:
    """The operations that took longest by themselves, without those that they called."""
    on_device = any(event.self_device_time_total for event in profiler.key_averages())
    seconds = {
        event.key: (event.self_device_time_total if on_device else event.self_cpu_time_total, event.count)
        for event in profiler.key_averages()
    }
    total = sum(time for time, _ in seconds.values()) or 1.0
    longest = sorted(seconds.items(), key=lambda item: -item[1][0])[:ROWS]
    rows = [(f"{time / 1000:.2f}", f"{time / total:.0%}", str(count), name) for name, (time, count) in longest]
    print_table(("GPU ms" if on_device else "CPU ms", "part", "calls", "operation"), rows, err=True)


def _new_file(path: Path) -> Path:
    """A new file in the folder of ``path`` with its suffix, because torch compresses files whose name ends in .gz."""
    part = path.with_name(f".{os.getpid()}.{path.name}")
    part.touch(exist_ok=False)
    return part
