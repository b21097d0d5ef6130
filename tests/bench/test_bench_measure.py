"""How benchmarks measure: rounds, graphs, floors, launches."""

from __future__ import annotations

from contextlib import contextmanager

import measure
import pytest
import report
import torch
from cases import Shape, StepInputs

CPU = torch.device("cpu")


def test_rounds_take_every_method_once_and_every_input_in_turn():
    seen = []
    methods = [measure.Method(n, lambda i, n=n: seen.append((n, i)), calls=3) for n in "ab"]
    samples = measure.interleave(methods, CPU, 0.0, least=4)
    assert seen == [(n, i) for i, order in ((0, "ab"), (1, "ba"), (2, "ab"), (0, "ba")) for n in order]
    assert all(len(s) == 4 for s in samples.values())
    assert measure.ratios([2.0, 6.0, 3.0], [1.0, 2.0, 3.0])["median"] == 2.0
    assert measure.summary([3.0]) == {"median": 3.0, "q1": 3.0, "q3": 3.0, "rounds": 1}


class Graph:
    """Stands where a CUDA graph stands: replays the calls that were made while it captured."""

    capturing: Graph | None = None

    def __init__(self):
        self.calls = []

    def replay(self):
        for run, i in self.calls:
            run(i)


@contextmanager
def capture(graph):
    Graph.capturing = graph
    try:
        yield
    finally:
        Graph.capturing = None


def recording(run):
    """``run``, noted by the graph that captures."""

    def noted(i):
        if Graph.capturing is not None:
            Graph.capturing.calls.append((run, i))
        return run(i)

    return noted


def test_a_graph_is_replayed_in_whole_passes():
    passes = []
    replay = measure.Method("ours", passes.append, timing="graph", held=8)
    replay.pace(CPU, 1.0)
    assert replay.key == "ours [graph]" and replay.calls_a_sample == 800
    before = len(passes)
    replay.sample()
    assert len(passes) - before == 100


def test_graphs_are_cold_and_warm(monkeypatch):
    """Cold: every set in turn. Warm: the first one, over and over. What cannot be captured keeps its calls alone."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    monkeypatch.setattr(measure, "clock", lambda work, device: [work(), 1e-3][1])
    seen = []

    def fails(i):
        if Graph.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    methods = [
        measure.Method("ours", recording(lambda i: seen.append(i)), 3, warm=recording(lambda i: seen.append("first"))),
        measure.Method("no warm", recording(lambda i: None), 3),
        measure.Method("syncs", fails, 3, warm=fails),
        measure.Method("peer", lambda i: None, 3, capturable=False),
    ]
    ready, unavailable = measure.prepare(methods, torch.device("cuda"), 0.0)
    keys = ["ours", "no warm", "syncs", "peer", "ours [cold]", "ours [warm]", "no warm [cold]"]
    assert [m.key for m in ready] == keys
    assert unavailable.keys() == {"syncs [cold]", "syncs [warm]"} and "capturing" in unavailable["syncs [cold]"]
    by_key = {m.key: m for m in ready}
    for key, calls in (("ours [cold]", [0, 1, 2]), ("ours [warm]", ["first"] * measure.WARM_CALLS)):
        seen.clear()
        by_key[key].run(0)
        assert seen == calls and by_key[key].held == len(calls)


def test_warm_calls_have_one_set_and_other_noise():
    inputs = StepInputs(Shape(1, 3, 1000, "float32"), "typical", 1.0, CPU, 4)
    assert inputs.sets == 4 and inputs.calls == 16
    ours = inputs.method("cpu", "cpu", True)
    cold, warm = ([str(run(i).tokens.tolist()) for i in range(16)] for run in (ours.run, ours.warm))
    assert warm[0] == cold[0] and len({*warm}) > 1 and warm != cold
    first = inputs.draft[0].clone()
    inputs.draft.fill_(float("nan"))[0] = first  # other sets are not looked at
    assert [str(ours.warm(i).tokens.tolist()) for i in range(16)] == warm
    assert str(ours.warm(16).tokens.tolist()) == warm[0]  # as many as a graph wants


def test_kernels_are_summed_by_name_and_are_not_copies():
    ran = [("gemm", 30e-6), ("Memcpy DtoD (Device -> Device)", 2e-6), ("ours", 1e-6), ("gemm", 10e-6)]
    found = measure.by_kernel(ran, 2)
    assert (found["kernels"], found["copies"]) == (1.5, 0.5) and found["seconds"] == pytest.approx(21.5e-6)
    assert [*found["longest"]][0] == "gemm" and found["longest"]["gemm"] == pytest.approx(20e-6)
    assert "unknown" in measure.by_kernel([], 1)


def test_bytes_of_reached_rows():
    shape = Shape(B=2, K=3, V=10, dtype="bfloat16")
    # Rejected at once, after one draft, never: target rows 1, 2, 4; draft rows 1, 2, 3 (statistics: 1, 1, 0).
    accepted = torch.tensor([0, 1, 3])
    assert shape.bytes_reached_rows(False, accepted) == pytest.approx(2 * 20 * (2 + 4 + 7) / 3)
    assert shape.bytes_reached_rows(True, accepted) == pytest.approx(2 * 20 * (2 + 3 + 4) / 3)
    # Rule `block` needs every row, `coupled` none of the draft's.
    assert shape.bytes_reached_rows(True, accepted, "block") == shape.bytes_all_rows(True, "block") == 2 * 20 * (4 + 3)
    assert shape.bytes_all_rows(False, "coupled") == 2 * 20 * 4
    assert shape.bytes_reached_rows(False, accepted, "coupled") == pytest.approx(2 * 20 * (1 + 2 + 4) / 3)


def test_a_floor_is_bytes_over_the_faster_bandwidth_or_a_launch():
    assert report.floor_seconds(100, {"read": 10.0, "copy": 20.0}) == 5.0
    assert report.floor_seconds(100, {"read": 10.0, "copy": 5.0, "launch_seconds": 11.0}) == 11.0
