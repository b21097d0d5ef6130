"""Steps of a loop under watch: where the host waits for the GPU, and which kernels run."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from measure import first_line

KERNELS = 15  # that take longest


@contextmanager
def _sync_debug(mode: str) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def synchronisations(step: Callable[[], object], steps: int) -> dict[str, object]:
    """How often a step synchronises, as torch sees it: {"a_step", "where", "forbidden"}. The last is what a step says
    where synchronising is an error, "ok" if nothing. What torch does not see is the wait for a report's event, one a
    step where the loop is not deferred."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _sync_debug("warn"):
            for _ in range(steps):
                step()
    places = Counter(f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message))
    forbidden = "ok"
    try:
        with _sync_debug("error"):
            for _ in range(steps):
                step()
    except Exception as error:  # which is the finding
        forbidden = first_line(error)
    return {"a_step": places.total() / steps, "where": dict(places), "forbidden": forbidden}


def profiled(step: Callable[[], object], steps: int) -> dict[str, object]:
    """Kernels of a step by torch.profiler: how many, their seconds, those of the longest by name, and the wall. The
    profiler itself slows the host down; a replayed graph is one launch and not touched by that."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - begun
    on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return {"wall_seconds": wall / steps, **by_kernel([(e.name, e.time_range.elapsed_us()) for e in on_gpu], steps)}


def by_kernel(ran: list[tuple[str, float]], steps: int) -> dict[str, object]:
    """{"kernels", "kernel_seconds", "longest": {name: seconds}} of a step, of (name, microseconds)."""
    seconds: Counter = Counter()
    for name, microseconds in ran:
        seconds[name[:120]] += microseconds * 1e-6
    longest = {name: s / steps for name, s in seconds.most_common(KERNELS)}
    return {"kernels": len(ran) / steps, "kernel_seconds": seconds.total() / steps, "longest": longest}
