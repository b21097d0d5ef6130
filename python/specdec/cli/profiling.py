"""Where the time of a generation goes: a trace of its first steps for Perfetto or chrome://tracing, and a table."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .terminal import print_table, remark
from .user_errors import refuse

if TYPE_CHECKING:
    from torch.profiler import profile

    from ..loop.sequence import Output

STEPS = 4  # that are recorded, with the prefill: a step of a small model is some thousand events already
ROWS = 15  # of the table


def check_trace(path: Path) -> None:
    """Refuses a file that cannot be written. To be called before models are loaded."""
    allowed = "a file in a folder that can be written to"
    if path.is_dir() or not path.parent.is_dir():
        refuse("--profile", f"{str(path)!r}, {'a folder' if path.is_dir() else 'in no folder'}", allowed)
    if not path.name.endswith(".json.gz"):
        refuse("--profile", repr(str(path)), "a name that ends in .json.gz")
    try:
        _new_file(path).unlink()
    except OSError as error:
        refuse("--profile", f"{str(path)!r} ({error.strerror})", allowed)


@contextmanager
def traced(path: Path | None) -> Iterator[Trace | None]:
    """Profiles the block up to the end of its step number STEPS, and writes the trace as a whole or not at all. With
    ``None`` it does nothing."""
    if path is None:
        yield None
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    from ..evaluation.advise.machine_trouble import NO_LOG

    os.environ.setdefault("KINETO_LOG_LEVEL", NO_LOG)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    trace = Trace(profile(activities=activities), path)
    try:
        yield trace
    finally:
        trace.stop()
    part = _new_file(path)
    try:
        trace.profiler.export_chrome_trace(str(part))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


class Trace:
    """A running profiler, which counts steps by what they emit and stops after STEPS of them."""

    def __init__(self, profiler: profile, path: Path):
        self.profiler, self._path = profiler, path
        self._steps, self._last, self._runs = 0, sys.maxsize, True
        profiler.start()

    def on_emit(self, output: Output) -> None:
        """As ``SpeculativeDecoder.generate`` calls it."""
        first = output.number <= self._last  # of its step, as a step's come in the order of their numbers
        self._last = output.number
        if self._runs and first:
            self._steps += 1
            if self._steps == STEPS:
                self.stop()

    def stop(self) -> None:
        if self._runs:
            self._runs = False
            self.profiler.stop()

    def print_operations(self) -> None:
        """Prints to stderr the operations that took longest by themselves, without those that they called."""
        events = self.profiler.key_averages()
        on_device = any(event.self_device_time_total for event in events)
        times = {e.key: e.self_device_time_total if on_device else e.self_cpu_time_total for e in events}
        counts, total = {e.key: e.count for e in events}, sum(times.values())
        rows = [
            (f"{times[name] / 1000:.2f}", f"{times[name] / total:.0%}", str(counts[name]), name)
            for name in sorted(times, key=lambda name: -times[name])[:ROWS]
        ]
        print_table(("GPU ms" if on_device else "CPU ms", "part", "calls", "operation"), rows, err=True)
        remark(f"{self._steps} steps and the prefill are in {str(self._path)!r}, for ui.perfetto.dev", "dim")


def _new_file(path: Path) -> Path:
    """A new file in the folder of ``path`` with its suffix, because torch compresses files whose name ends in .gz."""
    part = path.with_name(f".{os.getpid()}.{path.name}")
    part.touch(exist_ok=False)
    return part
