"""Starts threads in which torch computes with a given number of its own threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


def computing_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """Returns a daemon thread, not yet started, in which torch computes with as many threads as in the calling thread
    now. That number comes from ``torch.set_num_threads``, OMP_NUM_THREADS or the process's CPUs (taskset, numactl,
    cgroups).

    torch keeps this number for each thread. A new thread takes the number that any thread set last, but only at its
    first operation that reads it: a matrix product before that runs on all CPUs.
    """
    count = torch.get_num_threads()

    def body() -> None:
        torch.set_num_threads(count)
        run()

    return threading.Thread(target=body, name=name, daemon=True)
