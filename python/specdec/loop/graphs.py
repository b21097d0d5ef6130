"""Runs a step as one CUDA graph, captured once for each shape and replayed from then on."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from ..drafters.guard import GuardedSession
from ..result import error_text

T = TypeVar("T")


def capture(call: Callable[[], T], pool: Any) -> tuple[Any, T]:
    """Captures ``call`` as a CUDA graph without running it. Returns the graph and the results of ``call``, whose
    memory every replay overwrites.

    Args:
        pool: a memory pool shared with graphs that never run at the same time; None: the graph's own.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    gc.collect()  # freeing an earlier graph during the capture would spoil it
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = call()
    return graph, result


class StepGraphs:
    """The graphs of a batch's step, by a key of all that a graph fixes: the shapes, and which parameters are used.

    The first step with a key runs without a graph, which compiles and allocates all that it needs. The second one is
    captured, and later ones are replayed. All graphs share one memory pool, since no two run at once. If memory or the
    budget is exhausted, or a model cannot be captured, a warning says why, and steps run without new graphs.

    Attributes:
        settled: whether the last step ran as later ones with its key will, so that its time says what they take.

    Args:
        budget: the bytes that all graphs together may take.
        capture, allocated: replaced in tests without a GPU.
    """

    def __init__(
        self,
        budget: int = 2 << 30,
        capture: Callable[[Callable[[], Any], Any], tuple[Any, Any]] = capture,
        allocated: Callable[[], int] | None = None,
    ):
        self.budget, self.bytes, self.replays, self.settled = budget, 0, 0, False
        self._capture, self._allocated = capture, allocated or torch.cuda.memory_reserved
        self._graphs: dict[Hashable, tuple[Any, Any]] = {}
        self._seen: set[Hashable] = set()
        self._pool: Any = None
        self._stopped = False

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, call: Callable[[], T], session: GuardedSession | None = None) -> T:
        """Returns the result of ``call``, by replaying its graph if there is one for ``key``. During a capture,
        ``session`` raises the drafter's errors instead of handling them."""
        self.settled = key in self._graphs
        if key not in self._graphs:
            if key not in self._seen or self._stopped or not self._captured(key, call, session):
                self.settled = self._stopped and key in self._seen
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
        except Exception as error:  # a step that cannot be captured can still run without a graph
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
