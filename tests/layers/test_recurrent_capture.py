"""The operations of recurrent layers in CUDA graphs: a step that was captured once, on rows that were fed nothing then,
does for any rows, positions and trees what calls do, to the last bit of what it returns and leaves behind.

Graphs need a GPU. Without one, only the comparison is tested: it must accept a correct stand-in for a graph, and reject
wrong ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from specdec_layers import Feed
from support.captured import called, cuda_graph, keeps, on_gpu, stale
from support.recurrences import Convolution, Delta, Layer, Ssd

ROWS, COLUMNS = 4, 6
LAYERS = {
    "convolution": Convolution,
    "delta rule": Delta,
    "delta rule by channel": lambda *given, **how: Delta(*given, by_channel=True, **how),
    "mamba-2": Ssd,
    "mamba-1": lambda *given, **how: Ssd(*given, heads=40, size=1, groups=1, by_number=True, skip=False, **how),
}
TREES = pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])


def made(kind: str, backend: str) -> Layer:
    return LAYERS[kind](ROWS, backend=backend, window=2 * COLUMNS)


@dataclass
class Step:
    inputs: list[torch.Tensor]
    feed: Feed

    def tensors(self) -> list[torch.Tensor]:
        given = (self.feed.start, self.feed.commit, self.feed.valid, self.feed.parents)
        return [*self.inputs, *(t for t in given if t is not None)]

    def fill(self, source: Step) -> None:
        for mine, other in zip(self.tensors(), source.tensors(), strict=True):
            mine.copy_(other)

    def of_nothing(self) -> Step:
        """Buffers for such steps, which feed no row anything."""
        feed = self.feed
        parents = None if feed.parents is None else feed.parents.clone()
        return Step(
            [x.clone() for x in self.inputs],
            Feed(feed.start.clone(), feed.commit.clone(), torch.zeros_like(feed.valid), parents=parents),
        )


def steps_of(layer: Layer, tree: bool) -> list[Step]:
    """Each begins behind the first tokens of the one before it, which stay."""
    chance, fresh = random.Random(tree), iter(range(1000))
    starts, found = dict.fromkeys(range(ROWS), 0), []
    for _ in range(5):
        fed = {row: {c: next(fresh) for c in range(COLUMNS)} for row in range(ROWS) if chance.random() < 0.7}
        parents = torch.tensor([[-1, *(chance.randrange(-1, c) for c in range(1, COLUMNS))] for _ in range(ROWS)])
        commits = {row: max(start - 1, 0) for row, start in starts.items()}
        found.append(Step(*layer.arguments(fed, dict(starts), commits, COLUMNS, parents=parents if tree else None)))
        for row in fed:
            starts[row] += chance.randint(1, COLUMNS - 1)
    return found


def replays_are_right(capture: Callable, kind: str, backend: str, tree: bool) -> None:
    """Captures a step once and replays it after all of its inputs have changed in place."""
    called_layer, captured = made(kind, backend), made(kind, backend)
    steps = steps_of(called_layer, tree)
    buffers = steps[0].of_nothing()
    replay = capture(lambda: [captured.run(buffers.inputs, buffers.feed)], buffers)
    for step in steps:
        buffers.fill(step)
        assert torch.equal(replay()[0], called_layer.run(step.inputs, step.feed))
    for mine, other in zip(left_behind(captured), left_behind(called_layer), strict=True):
        assert torch.equal(mine.nan_to_num(), other.nan_to_num())


def left_behind(layer: Layer) -> list[torch.Tensor]:
    return [*layer.windows(), *([] if isinstance(layer, Convolution) else layer.held[0][:2])]


@on_gpu
@TREES
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("gpu_backend", ["triton"])
def test_graph_replay(gpu_backend, kind, tree):
    replays_are_right(cuda_graph, kind, gpu_backend, tree)


@on_gpu
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("gpu_backend", ["triton"])
def test_on_another_stream(gpu_backend, kind):
    """The operations run on the current stream, after work there that computes their inputs."""
    here, there = made(kind, gpu_backend), made(kind, gpu_backend)
    first, second = steps_of(here, False)[:2]
    buffers = first.of_nothing()
    there.run(first.inputs, first.feed)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # cycles: tens of milliseconds
        buffers.fill(second)
        got = there.run(buffers.inputs, buffers.feed)
    stream.synchronize()
    here.run(first.inputs, first.feed)
    assert torch.equal(got, here.run(second.inputs, second.feed))


# ---- The comparison itself, on a CPU


@TREES
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("backend", ["cpu"])
def test_the_comparison_passes_what_is_right(backend, kind, tree):
    replays_are_right(called, kind, backend, tree)


INPUTS = ("q", "k", "v", "g", "beta", "start", "commit", "valid", "parents")


@pytest.mark.parametrize("capture", [stale, *(keeps(i) for i in range(len(INPUTS)))], ids=["everything", *INPUTS])
def test_the_comparison_finds_what_a_graph_keeps(capture):
    assert len(steps_of(made("delta rule", "cpu"), True)[0].tensors()) == len(INPUTS)
    with pytest.raises(AssertionError):
        replays_are_right(capture, "delta rule", "cpu", True)
