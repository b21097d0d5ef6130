"""What makes every number bad, whatever is decoded: too many threads, or forwards that mostly copy."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

FORWARDS = 3  # that are timed with each number of threads, after one that is not
SLOWER = 1.25  # times slower than with fewer threads: what is more than noise
MUCH = 0.3  # of a forward's time, from which on copies dominate
NO_LOG = "6"  # of torch's profiler, which otherwise writes to stderr when it begins and ends
MATRIX = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear")
COPIES = (
    *("aten::copy_", "aten::clone", "aten::contiguous", "aten::cat", "aten::repeat", "aten::gather", "aten::fill_"),
    *("aten::index_put_", "aten::_index_put_impl_", "aten::index_copy_", "aten::index_select"),
)


@dataclass(frozen=True)
class Threads:
    """
    Attributes:
        count: with how many threads torch computes.
        usable: CPUs that the process may use.
        load: threads of all processes that ran or waited before, on average over a minute; None: unknown.
        seconds: of a forward, by the number of threads.
    """

    count: int
    usable: int
    load: float | None
    seconds: dict[int, float]

    @property
    def best(self) -> int:
        """The number of threads that is fastest; the present one unless another is clearly faster."""
        fastest = min(self.seconds, key=self.seconds.__getitem__)
        return fastest if self.seconds[self.count] > 1.1 * self.seconds[fastest] else self.count

    @property
    def oversubscribed(self) -> bool:
        """Whether threads wait for CPUs: there are more than the process may use, or others leave it fewer and it
        shows. A small model that is merely faster with fewer threads is no trouble."""
        fewer = [s for n, s in self.seconds.items() if n < self.count]
        shows = bool(fewer) and self.seconds[self.count] > SLOWER * min(fewer)
        busy = self.load is not None and self.load >= self.usable
        return self.count > self.usable or (shows and busy)


def time_threads(
    forward: Callable[[], object], usable: int, load: float | None, clock: Callable[[], float] = time.perf_counter
) -> Threads:
    """Times ``forward`` with 1, 2, 4, ... threads up to the usable CPUs, and with the present number."""
    count = torch.get_num_threads()
    numbers = sorted({*(1 << i for i in range(usable.bit_length()) if 1 << i <= usable), usable, count})
    seconds: dict[int, float] = {}
    try:
        for number in numbers:
            torch.set_num_threads(number)
            forward()
            taken = []
            for _ in range(FORWARDS):
                began = clock()
                forward()
                taken.append(clock() - began)
            seconds[number] = statistics.median(taken)
    finally:
        torch.set_num_threads(count)
    return Threads(count, usable, load, seconds)


@dataclass(frozen=True)
class Shares:
    """The parts of a forward's time in operations: matrix products, copies, and all others."""

    matrix: float
    copies: float
    other: float

    @property
    def copies_dominate(self) -> bool:
        return self.copies >= MUCH


def profile_forward(forward: Callable[[], object], on_gpu: bool) -> Shares:
    """Profiles a forward. Attention by one fused operation counts as others, and what it copies inside is not seen."""
    os.environ.setdefault("KINETO_LOG_LEVEL", NO_LOG)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as recorded:
        forward()
    times = {e.key: e.self_device_time_total if on_gpu else e.self_cpu_time_total for e in recorded.key_averages()}
    return shares(times)


def shares(times: dict[str, float]) -> Shares:
    """Returns the shares of these times by operation."""
    total = sum(times.values()) or 1.0
    matrix = sum(t for name, t in times.items() if name.startswith(MATRIX)) / total
    copies = sum(t for name, t in times.items() if name in COPIES) / total
    return Shares(matrix, copies, 1 - matrix - copies)
