"""Threads that compute, and how many torch uses in them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


def computing_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread, not yet started, in which torch computes with as many threads as in the calling one now: what
    ``torch.set_num_threads``, OMP_NUM_THREADS or the process's CPUs (taskset, numactl, cgroups) made of it.

    torch's count belongs to a thread. A new one takes the count that any thread set last, and only with its first
    operation that asks: a matrix product before that runs on all CPUs whatever was set.
    """
    count = torch.get_num_threads()

    def body() -> None:
        torch.set_num_threads(count)
        run()

    return threading.Thread(target=body, name=name, daemon=True)
