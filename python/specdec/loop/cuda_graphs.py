"""A step as one CUDA graph: captured once for each shape, replayed from then on."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

import torch

from ..drafters.guard import GuardedSession
from ..result import error_text

T = TypeVar("T")


class Graph(Protocol):
    def replay(self) -> None: ...


def capture(call: Callable[[], T], pool: Any) -> tuple[Graph, T]:
    """``call`` as a CUDA graph, and its results, which every replay writes anew. Nothing runs yet.

    Args:
        pool: of graphs that never run at the same time; None: of its own.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    gc.collect()  # a graph of before that is freed while another is captured spoils it
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = call()
    return graph, result


class StepGraphs:
    """Graphs of a batch's step, by what a graph has fixed: the shape, and which parameters do anything.

    A step with a new key runs as it is, which compiles and allocates whatever it needs; the next one with that key is
    captured, and all after that are replays. All graphs share one memory pool, as no two run at once. Where memory, or
    the budget, is at its end, or a model cannot be captured, steps run as they are, with a warning that says why.

    Args:
        budget: bytes that graphs may take together.
        capture, allocated: for tests without a GPU.
    """

    def __init__(
        self,
        budget: int = 2 << 30,
        capture: Callable[[Callable[[], Any], Any], tuple[Graph, Any]] = capture,
        allocated: Callable[[], int] | None = None,
    ):
        self.budget, self.bytes, self.replays = budget, 0, 0
        self._capture, self._allocated = capture, allocated or torch.cuda.memory_reserved
        self._graphs: dict[Hashable, tuple[Graph, Any]] = {}
        self._seen: set[Hashable] = set()
        self._pool: Any = None
        self._stopped = False

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, call: Callable[[], T], session: GuardedSession | None = None) -> T:
        """What ``call`` returns, by a graph if there is one for ``key``. ``session``: a drafter's, whose errors are to
        reach the capture."""
        if key not in self._graphs:
            if key not in self._seen or self._stopped or not self._captured(key, call, session):
                self._seen.add(key)
                return call()
        graph, result = self._graphs[key]
        graph.replay()
        self.replays += 1
        return result

    def _captured(self, key: Hashable, call: Callable[[], T], session: GuardedSession | None) -> bool:
        before = self._allocated()
        try:
            if session is not None:
                session.raising = True
            graph, result = self._capture(call, self._pool)
        except Exception as error:  # whatever cannot be captured can still run
            self._stop(error_text(error))
            return False
        finally:
            if session is not None:
                session.raising = False
        self._pool = self._pool or getattr(graph, "pool", lambda: None)()
        self._graphs[key] = graph, result
        self.bytes += max(self._allocated() - before, 0)
        if self.bytes >= self.budget:
            self._stop(f"{len(self)} graphs take {self.bytes} bytes, allowed: {self.budget}")
        return True

    def _stop(self, why: str) -> None:
        self._stopped = True
        warnings.warn(f"no more CUDA graphs are captured, other steps run without: {why}", RuntimeWarning, 2)
