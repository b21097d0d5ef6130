"""Looks into calls on a GPU: which kernels run, and where the host waits for the device."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable

import torch
from measure import first_line

LONGEST = 15  # kernels that a profile names


def _profile(run: Callable[[], object]) -> tuple[list[tuple[str, float]], float]:
    """((name, microseconds) of everything that ran on the GPU, seconds by the wall)."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - begun
    on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [(e.name, e.time_range.elapsed_us()) for e in on_gpu], wall


def launches(run: Callable[[int], object], device: torch.device) -> dict[str, object]:
    """{"kernels", "copies" (with memory sets), "names"} of one call, after another that is not counted, or {"unknown":
    why} where they cannot be seen."""
    if device.type != "cuda":
        return {"unknown": "kernels are launched on GPUs"}
    try:
        run(0)
        return counted([name for name, _ in _profile(lambda: run(0))[0]])
    except Exception as error:  # a profiler that does not work here is a result
        return {"unknown": first_line(error)}


def counted(names: list[str]) -> dict[str, object]:
    """Tells kernels from copies."""
    if not names:
        return {"unknown": "the profiler saw nothing on the GPU"}
    copies = [n for n in names if n.startswith(("Memcpy", "Memset"))]
    kernels = [n for n in names if n not in copies]
    return {"kernels": len(kernels), "copies": len(copies), "names": sorted({n[:120] for n in kernels})}


def profiled(step: Callable[[], object], steps: int) -> dict[str, object]:
    """The kernels of a step, the seconds of the longest, and the wall time. The profiler slows the host down, but not a
    replayed graph."""

    def run() -> None:
        for _ in range(steps):
            step()

    ran, wall = _profile(run)
    return {"wall_seconds": wall / steps, **by_kernel(ran, steps)}


def by_kernel(ran: list[tuple[str, float]], steps: int) -> dict[str, object]:
    """{"kernels", "kernel_seconds", "longest": {name: seconds}} of one step, from (name, microseconds)."""
    seconds: Counter = Counter()
    for name, microseconds in ran:
        seconds[name[:120]] += microseconds * 1e-6
    longest = {name: s / steps for name, s in seconds.most_common(LONGEST)}
    return {"kernels": len(ran) / steps, "kernel_seconds": seconds.total() / steps, "longest": longest}


def _run_in_mode(mode: str, step: Callable[[], object], steps: int) -> None:
    torch.cuda.set_sync_debug_mode(mode)
    try:
        for _ in range(steps):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def synchronisations(step: Callable[[], object], steps: int) -> dict[str, object]:
    """How often a step synchronises, as torch sees it: {"a_step", "where", "forbidden"}. "forbidden" is the error of a
    step that may not synchronise, or "ok". torch does not see the wait for a report's event, of which there is one a
    step where the loop is not deferred."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _run_in_mode("warn", step, steps)
    places = Counter(f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message))
    forbidden = "ok"
    try:
        _run_in_mode("error", step, steps)
    except Exception as error:  # this is the finding
        forbidden = first_line(error)
    return {"a_step": places.total() / steps, "where": dict(places), "forbidden": forbidden}
