"""How every benchmark measures: interleaved rounds, medians of ratios by round, and a look at what runs on a GPU."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

Name = TypeVar("Name")
ROUNDS_A_ROW = 10  # about; samples are paced for it
WARM_CALLS = 20  # in a graph that finds its inputs in the cache


@dataclass
class Method:
    """Something to time. ``run(i)`` is call number i = 0 .. calls - 1; calls are taken in turn."""

    name: str
    run: Callable[[int], object]
    calls: int = 1
    capturable: bool = True  # no host synchronisation inside, so a CUDA graph can hold it
    # "call": issued from Python, its overhead included; "cold", "warm" (and "graph", where there is no input to speak
    # of): a CUDA graph replayed, see README.md.
    timing: str = "call"
    calls_a_sample: int = 1
    next_call: int = 0
    warm: Callable[[int], object] | None = None  # the same on one set of inputs, so that the caches hold it
    held: int = 1  # calls in one run, which is a graph's pass

    @property
    def key(self) -> str:
        return self.name if self.timing == "call" else f"{self.name} [{self.timing}]"

    def sample(self) -> None:
        for _ in range(self.calls_a_sample // self.held):
            self.run(self.next_call)
            self.next_call = (self.next_call + 1) % self.calls

    def pace(self, device: torch.device, seconds: float) -> None:
        """Makes a sample take about ``seconds``: several runs back to back, so that the clock's own cost is spread."""
        runs = min(self.calls, 4)
        self.calls_a_sample = runs * self.held
        a_run = clock(self.sample, device) / runs
        self.calls_a_sample = max(1, min(int(seconds / max(a_run, 1e-7)), max(self.calls, 100))) * self.held

    def captured(self, timing: str) -> Method:
        """One pass as a CUDA graph; ``warm``: so many calls on one set. Warm up first: nothing may be compiled while
        capturing."""
        run, calls = (self.warm, WARM_CALLS) if timing == "warm" else (self.run, self.calls)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for i in range(calls):
                run(i)
        return Method(self.name, lambda i: graph.replay(), timing=timing, calls_a_sample=calls, held=calls)


def first_line(error: BaseException) -> str:
    """One line that says why a method cannot run."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def prepare(methods: Sequence[Method], device: torch.device, seconds: float) -> tuple[list[Method], dict[str, str]]:
    """Warms up and paces for a row of ``seconds``; on CUDA adds the graph forms of each capturable method.

    Returns (those that can run, {key: why another cannot}).
    """
    ready, unavailable = [], {}
    for method in methods:
        try:
            for _ in range(8):  # they see every alignment of the inputs, for each of which Triton compiles anew
                method.sample()
            synchronize(device)
            ready.append(method)
        except Exception as error:  # a peer's failure is a result, not the end of the benchmark
            unavailable[method.key] = first_line(error)
        method.next_call = 0
    for method in [m for m in ready if m.capturable and device.type == "cuda"]:
        for timing in ("cold", "warm") if method.warm is not None else ("cold",):
            try:
                replay = method.captured(timing)
                replay.sample()
                synchronize(device)
                ready.append(replay)
            except Exception as error:
                unavailable[f"{method.name} [{timing}]"] = first_line(error)
    for method in ready:
        method.pace(device, seconds / (ROUNDS_A_ROW * len(ready)))
    return ready, unavailable


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of ``work``: CUDA events on a GPU, the wall elsewhere."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def in_turns(names: Sequence[Name], rounds: int) -> Iterator[Name]:
    """In each round every name once, and each round starts with another, so that noise hits all alike."""
    for r in range(rounds):
        for i in range(len(names)):
            yield names[(i + r) % len(names)]


def interleave(
    methods: Sequence[Method], device: torch.device, seconds: float, least: int = 5, most: int = 50
) -> dict[str, list[float]]:
    """Rounds, which end after ``seconds``, but not before ``least`` of them nor after ``most``.

    Returns {key: [seconds a call, by round]}.
    """
    samples: dict[str, list[float]] = {m.key: [] for m in methods}
    end = time.perf_counter() + seconds
    for turn, m in enumerate(in_turns(methods, most)):
        if turn % len(methods) == 0 and turn >= least * len(methods) and time.perf_counter() > end:
            break
        samples[m.key].append(clock(m.sample, device) / m.calls_a_sample)
    return samples


def all_timed(
    ways: Mapping[str, Callable[[int], object]], device: torch.device, seconds: float
) -> tuple[list[Method], dict[str, list[float]]]:
    """(methods, samples) of calls by name. Raises RuntimeError if one cannot run."""
    methods, failed = prepare([Method(name, run) for name, run in ways.items()], device, seconds)
    if failed:
        raise RuntimeError(str(failed))
    return methods, interleave(methods, device, seconds)


def summary(samples: Sequence[float]) -> dict[str, float | int]:
    quartiles = [*samples] * 3  # of a single sample
    if len(samples) > 1:
        quartiles = statistics.quantiles(samples, n=4, method="inclusive")
    q1, median, q3 = quartiles
    return {"median": median, "q1": q1, "q3": q3, "rounds": len(samples)}


def ratios(a: Sequence[float], b: Sequence[float] | float) -> dict[str, float | int]:
    """a / b by round (a number stands for every round): the summary of ratios, not the ratio of summaries."""
    return summary([x / y for x, y in zip(a, b if isinstance(b, Sequence) else [b] * len(a), strict=True)])


def compared(
    method: Method, others: Iterable[Method], samples: Mapping[str, list[float]], floors: Mapping[str, float]
) -> dict[str, dict[str, float | int]]:
    """{"method/other": ratios} of a method to floors, seconds by name, and to those others that are timed alike."""
    mine = samples[method.key]
    found = {f"{method.key}/{name}": ratios(mine, floor) for name, floor in floors.items()}
    alike = (other.key for other in others if other.timing == method.timing)
    return found | {f"{method.key}/{key}": ratios(mine, samples[key]) for key in alike}


# ---- What runs on a GPU, and where the host waits for it


def profiled(step: Callable[[], object], steps: int = 1) -> dict[str, object]:
    """The kernels of a step and the wall time, by torch.profiler, which slows the host down, but not a replayed graph.
    {"unknown": why} where they cannot be seen."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    try:
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            begun = time.perf_counter()
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
            wall = time.perf_counter() - begun
        on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        found = by_kernel([(e.name, e.time_range.elapsed_us() * 1e-6) for e in on_gpu], steps)
    except Exception as error:  # no GPU, or a profiler that does not work here: a result
        return {"unknown": first_line(error)}
    return {"wall_seconds": wall / steps, **found}


def by_kernel(ran: Sequence[tuple[str, float]], steps: int) -> dict[str, object]:
    """{"kernels", "copies" (with memory sets), "seconds" (of both), "longest": {name: seconds}} of one step."""
    if not ran:
        return {"unknown": "the profiler saw nothing on the GPU"}
    seconds: Counter = Counter()
    for name, taken in ran:
        seconds[name[:120]] += taken / steps
    copies = sum(name.startswith(("Memcpy", "Memset")) for name, _ in ran)
    found = {"kernels": (len(ran) - copies) / steps, "copies": copies / steps}
    return found | {"seconds": seconds.total(), "longest": dict(seconds.most_common(15))}


def synchronisations(step: Callable[[], object], steps: int) -> dict[str, object]:
    """How often a step synchronises, as torch sees it: {"a_step", "where", "forbidden"}. "forbidden" is the error of a
    step that may not synchronise, or "ok". torch does not see the wait for a report's event, of which there is one a
    step where the loop is not deferred."""

    def run(mode: str) -> None:
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for _ in range(steps):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run("warn")
    places = Counter(f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message))
    forbidden = "ok"
    try:
        run("error")
    except Exception as error:  # this is the finding
        forbidden = first_line(error)
    return {"a_step": places.total() / steps, "where": dict(places), "forbidden": forbidden}
