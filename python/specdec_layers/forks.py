"""Processes that are forked from one that has computed. Their native operations have threads of their own
(csrc/common/pool.cpp); PyTorch's OpenMP has not, and its next operation with several threads would wait for ever for
those that stayed behind. So a forked process computes with one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch

_told: list[Callable[[], None]] = []


def when_forked(call: Callable[[], None]) -> Callable[[], None]:
    """Has ``call`` called in processes that are forked from this one after :func:`survive_forks`. A decorator."""
    _told.append(call)
    return call


@functools.cache
def survive_forks() -> None:
    """From now on, processes that ``os.fork`` makes of this one, and so multiprocessing and workers of a DataLoader,
    compute with one thread, until they are told otherwise (``torch.set_num_threads``)."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    torch.set_num_threads(1)
    for call in _told:
        call()
