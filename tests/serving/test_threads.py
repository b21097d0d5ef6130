"""How many threads compute: as many as the caller's torch says, also in a thread of our own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from specdec.serving.engine import computing_thread

CPUS = sorted(os.sched_getaffinity(0))
several = pytest.mark.skipif(len(CPUS) < 2, reason="one CPU")


def computed_with(thread_count: int | None, between: int | None = None) -> tuple[int, int]:
    """torch's count in a new thread, and how many helpers it started. ``thread_count``: the caller's; ``between``:
    another thread's, set before the new one starts."""
    seen = []

    def work() -> None:
        before = set(os.listdir("/proc/self/task"))
        x = torch.zeros(600, 600)  # serial: the product comes first, which asks for the count too late
        for _ in range(4):
            x = x @ x
            torch.sin(x)
        seen.extend((torch.get_num_threads(), len(set(os.listdir("/proc/self/task")) - before)))

    if thread_count is not None:
        torch.set_num_threads(thread_count)
    thread = computing_thread(work, "engine")
    if between is not None:
        other = threading.Thread(target=torch.set_num_threads, args=(between,))
        other.start()
        other.join()
    thread.start()
    thread.join()
    return tuple(seen)


@several
def test_the_callers_count_is_the_threads():
    """Not the one that was set last in the process, which is what torch would take. OpenMP keeps helpers for each
    thread that asks for some."""
    assert computed_with(1) == (1, 0)
    count, helpers = computed_with(2, between=1)
    assert count == 2 and helpers >= 1
    assert computed_with(1, between=2) == (1, 0)


@pytest.mark.nightly
@several
@pytest.mark.parametrize(
    "prefix, environment",
    (
        (("taskset", "-c", str(CPUS[0])), {}),
        ((), {"OMP_NUM_THREADS": "1"}),
    ),
    ids=("taskset", "OMP_NUM_THREADS"),
)
def test_what_the_process_was_given_is_what_it_takes(prefix, environment):
    """CPUs, or a number of threads, from outside: nothing here asks for more."""
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} | environment
    env["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    program = "import os, test_threads; print(test_threads.computed_with(None), len(os.sched_getaffinity(0)))"
    done = subprocess.run([*prefix, sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"(1, 0) {1 if prefix else len(CPUS)}\n"
