"""The threads of native operations on a CPU, which are not PyTorch's."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator

import torch

from .backends.native import missing
from .forks import when_forked

_inside = dict[int, int]()  # threads of Python that are within native_threads(), and how many threads torch had in each
_known = threading.local()


@contextlib.contextmanager
def native_threads() -> Iterator[None]:
    """Within it, native operations on a CPU have the threads that torch has, and PyTorch's own operations have one.

    For work whose greater part is native. PyTorch's threads, which are OpenMP's, wait for the next operation by
    spinning, for milliseconds, and take cores from native operations meanwhile: one sum of 32,769 numbers can cost more
    than a linear layer. It holds for the thread of Python that is inside, and does nothing without native code.
    """
    this = threading.get_ident()
    if this in _inside or missing() is not None:
        yield
        return
    threads = _threads()
    extension = importlib.import_module("specdec_layers._C")
    _inside[this] = threads
    extension.use_threads(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(_inside.pop(this))
        extension.use_threads(0)


@when_forked
def _alone() -> None:
    """None of the others that were inside is in this process, and this one goes on with one thread."""
    this = threading.get_ident()
    inside = this in _inside
    _inside.clear()
    if inside:
        _inside[this] = 1


def _threads() -> int:
    """Returns how many threads torch has in this thread of Python. A new one begins with the number that was set last,
    which is 1 while another is inside."""
    found = torch.get_num_threads()
    if found == 1 and not hasattr(_known, "found"):
        found = max([1, *_inside.values()])
    _known.found = True
    return found
