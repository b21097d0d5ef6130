"""Ways to repeat what was called once: as a CUDA graph, and stand-ins that need no GPU, right and wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pytest
import torch

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


class Buffers(Protocol):
    """What the calls read."""

    def tensors(self) -> list[torch.Tensor]: ...


def cuda_graph(function: Callable[[], list], buffers: Buffers) -> Callable[[], list]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiling and loading must happen before the capture
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()

    def replay() -> list:
        for t in outputs:
            t.fill_(-3)  # so that what a replay does not write is wrong
        graph.replay()
        return outputs

    return replay


def called(function: Callable[[], list], buffers: Buffers) -> Callable[[], list]:
    """A correct graph: it computes again."""
    return function


def stale(function: Callable[[], list], buffers: Buffers) -> Callable[[], list]:
    """A wrong graph that does nothing: outputs stay those of the capture."""
    outputs = function()
    return lambda: outputs


def keeps(number: int) -> Callable:
    """A wrong graph that keeps the captured values of one input."""

    def capture(function: Callable[[], list], buffers: Buffers) -> Callable[[], list]:
        kept = buffers.tensors()[number].clone()

        def replay() -> list:
            buffers.tensors()[number].copy_(kept)
            return function()

        return replay

    return capture
