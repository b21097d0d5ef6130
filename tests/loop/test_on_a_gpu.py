"""What the loop does on a GPU only, with stand-ins for the GPU: copies that do not wait, events, and whether steps are
graphs; test_graphs.py has the graphs themselves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from specdec import SpeculativeDecoder
from specdec.drafters.protocol import Drafts
from specdec.loop.report import PendingReport, RowReport, StepResult, StepTimer
from specdec.loop.rows import upload
from specdec.loop.step import AcceptRule
from specdec.models.forward.cached_model import CachedModel
from specdec.sampling.token_table import HostTable
from support.models import tiny_model

from specdec_kernels import SamplingParams

GPU = torch.device("cuda", 0)


class OnDevice(torch.Tensor):
    device, is_cuda = GPU, True


class Pinned(torch.Tensor):
    """Memory of the host. Copies to it are made late: when an event behind them is waited for."""

    waiting: list = []

    def copy_(self, source, non_blocking=False):
        assert non_blocking, "a copy that waits"
        Pinned.waiting.append(lambda: torch.Tensor.copy_(self, source.as_subclass(torch.Tensor)))
        return self

    def to(self, device, non_blocking=False):
        assert device == GPU and non_blocking
        return self.as_subclass(OnDevice)


class Event:
    clock = 0.0  # milliseconds

    def __init__(self, enable_timing: bool = False):
        self.timed, self.at, self.before = enable_timing, None, []

    def record(self):
        Event.clock += 250.0
        self.at, self.before = Event.clock, list(Pinned.waiting)

    def synchronize(self):
        for copy in self.before:
            copy()

    def elapsed_time(self, other):
        assert self.timed and other.timed
        return other.at - self.at


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(Pinned, "waiting", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone().as_subclass(Pinned))
    empty = torch.empty

    def pinned(*shape, pin_memory=False, **options):
        made = empty(*shape, **options)
        return made.as_subclass(Pinned) if pin_memory else made

    monkeypatch.setattr(torch, "empty", pinned)


def test_a_report_is_read_when_its_copy_is_there():
    # Nodes, drafted, tested, emitted, accepted and status; then the emitted tokens, and the drafts.
    report = torch.tensor([[2, 2, 2, 3, 2, 0, 11, 12, 13, 11, 12], [1, 1, 1, 1, 0, 0, 7, -1, -1, 8, 9]])
    out = SimpleNamespace(tokens=report[:, 6:9])
    result = StepResult(Drafts(report[:, -2:]), torch.zeros(2, 3, 20), out, report.as_subclass(OnDevice), None)
    pending = PendingReport(result)
    assert len(Pinned.waiting) == 1
    assert pending.read() == [
        RowReport([11, 12, 13], 2, 2, 2, 2, 0, [11, 12], None),
        RowReport([7], 1, 1, 1, 0, 0, [8], None),
    ]


def test_what_the_host_sends_is_pinned_and_not_waited_for():
    sent = upload([3, 1, 2], torch.int64, GPU)
    assert type(sent) is OnDevice and sent.tolist() == [3, 1, 2]
    params = {"repetition_penalty": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.0}
    table = HostTable(1, 1, GPU)
    table.begin(0, params, {5: 1.0}, [], 3, [2], 4)
    columns = table.on_device()
    assert all(type(column) is OnDevice for column in columns)
    table.add(0, [9])  # the copies have memory of their own
    assert columns.ids[0, :2].tolist() == [5, SamplingParams.TABLE_PADDING]


def test_a_step_is_timed_by_events():
    timer = StepTimer(GPU)
    timer.stop()
    assert timer.seconds == 0.25


@pytest.mark.parametrize(
    ("device", "cuda", "budget", "graphs"),
    [(GPU, "13.0", 1, True), (GPU, None, 1, False), (GPU, "13.0", 0, False), (torch.device("cpu"), "13.0", 1, False)],
)
def test_whether_steps_are_graphs(monkeypatch, device, cuda, budget, graphs):
    """Not on AMD's GPUs, whose torch has no CUDA."""
    decoder = SpeculativeDecoder(tiny_model(), None, 0, graph_bytes=budget)
    monkeypatch.setattr(decoder.target, "device", device)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    config = decoder.batch_config(1, 20, AcceptRule(), 1)
    assert (config.graphs is not None) == graphs


@torch.no_grad()  # another test may have made the model in inference mode
def test_a_boolean_mask_is_the_same_as_one_that_is_added(monkeypatch):
    """sdpa takes the first on a GPU, the second on a CPU."""
    model, seen = tiny_model(), []
    for added in (True, False):
        cached = CachedModel(model, attention="model")
        monkeypatch.setattr(cached.attention, "_adds_mask", added)
        cache = cached.new_cache(1, 20)
        cached.prefill(cache, [[1, 2, 3]])
        places = torch.tensor([[3, 4]])
        layout = cached.layout(places, places, 10)
        seen.append((layout.mask.dtype, cached(torch.tensor([[5, 6]]), cache, layout)))
    assert [dtype for dtype, _ in seen] == [torch.float32, torch.bool]
    torch.testing.assert_close(seen[0][1], seen[1][1])
