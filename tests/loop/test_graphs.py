"""A step as one graph: the same texts as without, no host in it, and what happens where it cannot be captured.

Only a GPU has graphs. Without one, a recording of the step's operations stands in: it repeats them on the same memory,
without the Python around them, as a graph does."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from specdec import AdaptiveDrafts, PromptLookupDrafter, Request, Scheduler, SpeculativeDecoder, Stats
from specdec.drafters import guard
from specdec.drafters.early_exit import EarlyExitDrafter
from specdec.loop.graphs import StepGraphs
from specdec.loop.rows import Rows
from specdec.loop.step_times import StepTimes
from support.allocations import masked
from support.models import prompts, tiny_model, tunable_pair
from support.recorded import Synchronised, record
from support.table_trees import BUSHY, TableTrees, bigrams, forgetful
from transformers import NoRepeatNGramLogitsProcessor

from specdec_kernels import SamplingParams, validation

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DISTRIBUTIONS = (
    None,
    SamplingParams(1.0),
    SamplingParams(0.8, top_k=20, top_p=0.9),
    SamplingParams(1.2, min_p=0.02),
)


REST = (
    ("token", "early_exit"), ("token", "none"), ("block", "early_exit"), ("block", "model"), ("block", "none"),
    ("coupled", "model"), ("coupled", "early_exit"), ("coupled", "none"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _values_are_not_read(monkeypatch):
    """Nor are they on a GPU."""
    monkeypatch.setattr(validation, "check_counts", lambda *values: None)
    monkeypatch.setattr(validation, "check_parents", lambda parents, batch, nodes, device: parents.expand(batch, -1))
    monkeypatch.setattr(guard, "_out_of_order", lambda parents: False)


def requests(distributions=DISTRIBUTIONS, count: int = 9, new: int = 20, **more) -> list[Request]:
    texts = prompts(count, 1, 40, seed=5)
    lengths = [new, 3, 13, 1]
    return [
        Request(text, lengths[i % 4], distributions[i % len(distributions)], seed=i, id=i, **more)
        for i, text in enumerate(texts)
    ]


def texts_of(decoder, asked, graphs=None, async_scheduling: bool = False, **settings) -> tuple[dict, Scheduler]:
    settings |= {"rows": 3, "max_length": 100, "prefill_chunk": 16, "async_scheduling": async_scheduling}
    scheduler = Scheduler(decoder, **settings)
    scheduler.batch.config = replace(scheduler.batch.config, graphs=graphs)
    return {o.request.id: (o.tokens, o.finish_reason, o.stats) for o in scheduler.run(asked)}, scheduler


def recorded_graphs(**more) -> StepGraphs:
    return StepGraphs(capture=record, allocated=lambda: 0, **more)


def drafters() -> dict:
    target, draft = tunable_pair(0.3)
    deep = tiny_model("llama", layers=3)
    return {"model": (target, draft, 3), "early_exit": (deep, EarlyExitDrafter(deep, 1), 3), "none": (target, None, 0)}


@pytest.mark.parametrize(
    "rule, drafter",
    [
        ("token", "model"),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in REST),
    ],
)
def test_replays_give_the_same_texts(drafter, rule):
    """Rows come and go, with other lengths and settings, between replays of one graph."""
    decoder = SpeculativeDecoder(*drafters()[drafter])
    asked = requests()
    plain, _ = texts_of(decoder, asked, rule=rule)
    for async_scheduling in (False, True):
        graphs = recorded_graphs()
        texts, scheduler = texts_of(decoder, asked, graphs, async_scheduling, rule=rule)
        assert texts == plain
        assert 0 < len(graphs) <= 8 and graphs.replays > scheduler.batch.steps // 2


@pytest.mark.parametrize("rule", ("block", *(pytest.param(r, marks=pytest.mark.nightly) for r in ("token", "coupled"))))
def test_trees_are_replayed(rule):
    """Trees that are drawn on the device, in one graph with their verification, but not those of texts."""
    asked = requests((None, SamplingParams(0.6), SamplingParams(0.8, top_k=20)))
    asked += requests((SamplingParams(0.7),), 3, 8, log_probs=True)
    decoder = SpeculativeDecoder(forgetful(), TableTrees(bigrams(forgetful()), BUSHY), 3, tree=len(BUSHY))
    plain, _ = texts_of(decoder, asked, rule=rule)
    assert sum(stats.accepted_by_position[1] for _, _, stats in plain.values()) > 3
    graphs = recorded_graphs()
    texts, scheduler = texts_of(decoder, asked, graphs, True, rule=rule)
    assert texts == plain and scheduler.drafter_error is None
    assert 0 < len(graphs) <= 8 and graphs.replays > scheduler.batch.steps // 2
    decoder, graphs = SpeculativeDecoder(forgetful(), PromptLookupDrafter(), 3, tree=8), recorded_graphs()
    assert texts_of(decoder, asked, graphs, True)[0].keys() == plain.keys() and graphs.replays == 0


@pytest.mark.parametrize("kind", ("gemma3", pytest.param("bloom", marks=pytest.mark.nightly)))
def test_other_masks(kind):
    model = tiny_model(kind)
    decoder = SpeculativeDecoder(model, model, num_drafts=2)
    graphs = recorded_graphs()
    assert texts_of(decoder, requests(), graphs)[0] == texts_of(decoder, requests())[0]
    assert graphs.replays > 10


def test_ends_within_a_replay():
    """End-of-sequence tokens are found on the device; a row that has ended emits nothing more."""
    decoder = SpeculativeDecoder(*tunable_pair(0.3), num_drafts=4)
    ends = list(range(8))
    asked = requests((SamplingParams(1.5),), 12, 40, eos_token_id=ends)
    plain, _ = texts_of(decoder, asked)
    assert sum(end == "eos" for _, end, _ in plain.values()) > 3
    assert all(tokens[-1] in ends and not {*tokens[:-1]} & {*ends} for tokens, end, _ in plain.values() if end == "eos")
    assert texts_of(decoder, asked, recorded_graphs(), True)[0] == plain


def test_a_text_outgrows_what_its_first_graph_sees(monkeypatch):
    """64 slots, then more."""
    masked(monkeypatch)
    decoder = SpeculativeDecoder(*tunable_pair(0.3), num_drafts=3)
    asked = [Request(text, 20, SamplingParams(1.0), seed=i, id=i) for i, text in enumerate(prompts(3, 50, 52))]
    graphs = recorded_graphs()
    assert texts_of(decoder, asked, graphs)[0] == texts_of(decoder, asked)[0]
    assert len(graphs) == 2


def test_a_filter_that_comes_after_a_capture():
    decoder, texts = SpeculativeDecoder(*tunable_pair(0.3), num_drafts=3), prompts(6, 5, 9)
    filters = [SamplingParams(1.5)] * 3 + [SamplingParams(1.5, top_k=2)] * 3
    asked = [Request(text, 16, filters[i], seed=i, id=i) for i, text in enumerate(texts)]
    graphs = recorded_graphs()
    assert texts_of(decoder, asked, graphs)[0] == texts_of(decoder, asked)[0]
    assert len(graphs) >= 2


@pytest.mark.parametrize("error", [None, RuntimeError("cannot be captured")])
def test_errors_of_drafters_are_raised_only_while_a_step_is_captured(error):
    raising = []

    def capture(call, pool):
        raising.append(session.raising)
        if error is not None:
            raise error
        return SimpleNamespace(replay=call), call()

    graphs, session = StepGraphs(capture=capture, allocated=lambda: 0), SimpleNamespace(raising=False)
    graphs.run("key", lambda: 0, session)
    with pytest.warns(RuntimeWarning, match="cannot be captured") if error else nullcontext():
        graphs.run("key", lambda: 0, session)
    assert raising == [True] and session.raising is False


def test_what_needs_the_host_runs_without_a_graph():
    target, draft = tunable_pair(0.3)
    processors = [NoRepeatNGramLogitsProcessor(1)]
    cases = (
        (SpeculativeDecoder(target, draft), {"distributions": (SamplingParams(1.0, frequency_penalty=0.5),)}),
        (SpeculativeDecoder(target, draft), {"distributions": (SamplingParams(1.0),), "logits_processor": processors}),
        (SpeculativeDecoder(target, draft), {"distributions": (SamplingParams(1.0),), "logit_bias": {3: 2.0}}),
        (SpeculativeDecoder(target, draft, confidence=0.3), {}),
        (SpeculativeDecoder(target, PromptLookupDrafter()), {}),
    )
    for decoder, more in cases:
        asked, graphs = requests(count=4, new=12, **more), recorded_graphs()
        assert texts_of(decoder, asked, graphs, True)[0] == texts_of(decoder, asked)[0]
        assert graphs.replays == 0
    # Only while such a sequence is there.
    asked = [*requests(count=3), *requests((SamplingParams(1.0, presence_penalty=1.0),), 1, 5), *requests(count=3)]
    graphs = recorded_graphs()
    assert texts_of(cases[0][0], asked, graphs, True)[0] == texts_of(cases[0][0], asked)[0]
    assert graphs.replays > 5


def test_a_stand_in_that_forgets_is_found():
    """The comparison sees a graph that reads what was there at the capture."""

    def stale(call, pool):
        graph, result = record(call, pool)
        written = ("aten.index_copy_", "specdec_layers.write_rows")  # keys
        graph.recording.calls = [c for c in graph.recording.calls if not str(c[0]).startswith(written)]
        return graph, result

    decoder = SpeculativeDecoder(*tunable_pair(0.3), num_drafts=3)
    broken = StepGraphs(capture=stale, allocated=lambda: 0)
    assert texts_of(decoder, requests(), broken)[0] != texts_of(decoder, requests())[0]


def test_a_step_that_waits_is_not_captured(monkeypatch):
    decoder = SpeculativeDecoder(*tunable_pair(0.3), num_drafts=2)
    plain, _ = texts_of(decoder, requests())
    graphs = recorded_graphs()
    place = Rows.place

    def waiting(self, host, table):
        self.room.max().item()
        return place(self, host, table)

    monkeypatch.setattr(Rows, "place", waiting)
    with pytest.warns(RuntimeWarning, match="no more CUDA graphs.*Synchronised"):
        assert texts_of(decoder, requests(), graphs)[0] == plain
    assert graphs.replays == 0 and not decoder_dropped(decoder)


def decoder_dropped(decoder) -> bool:
    return Scheduler(decoder, rows=1, max_length=20).batch.session.error is not None


def test_out_of_memory_in_a_capture(monkeypatch):
    """The step runs all the same, with a warning, and the drafter is not blamed."""
    decoder = SpeculativeDecoder(*tunable_pair(0.3), num_drafts=2)
    calls = itertools.count()

    def fails(call, pool):
        if next(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return record(call, pool)

    graphs = StepGraphs(capture=fails, allocated=lambda: 0)
    with pytest.warns(RuntimeWarning, match="OutOfMemoryError") as caught:
        texts, scheduler = texts_of(decoder, requests(), graphs)
    assert len([w for w in caught if "no more CUDA graphs" in str(w.message)]) == 1
    assert texts == texts_of(decoder, requests())[0]
    assert len(graphs) == 1 and graphs.replays > 0 and next(calls) == 2
    assert scheduler.batch.session.error is None


def test_a_budget_in_bytes():
    used = itertools.count(0, 500)  # each look finds so many more
    graphs = StepGraphs(budget=1500, capture=record, allocated=lambda: next(used))
    decoder = SpeculativeDecoder(*tunable_pair(0.3), num_drafts=2)
    with pytest.warns(RuntimeWarning, match="3 graphs take 1500 bytes, allowed: 1500"):
        texts, _ = texts_of(decoder, requests(new=40), graphs)
    assert texts == texts_of(decoder, requests(new=40))[0]
    assert len(graphs) == 3


def test_a_recording_refuses_to_wait():
    with pytest.raises(Synchronised):
        record(lambda: torch.ones(3).sum().item(), None)
    with pytest.raises(Synchronised):
        record(lambda: bool(torch.ones(()) > 0), None)


# ---- on a GPU ----------------------------------------------------------------------------------------------


@on_gpu
@pytest.mark.parametrize("rule", ("token", "block", "coupled"))
@pytest.mark.parametrize("async_scheduling", (False, True))
def test_cuda_graphs_give_the_same_texts(rule, async_scheduling):
    target, draft = (copy.deepcopy(m).cuda() for m in tunable_pair(0.3))
    decoder = SpeculativeDecoder(target, draft, num_drafts=3)
    plain, _ = texts_of(decoder, requests(), rule=rule)
    graphs = StepGraphs()
    assert texts_of(decoder, requests(), graphs, async_scheduling, rule=rule)[0] == plain
    assert len(graphs) > 0 and graphs.replays > 0


@on_gpu
@pytest.mark.parametrize("graphs", (False, True))
def test_no_step_waits_for_the_gpu(graphs):
    """Steps ahead of the host, of full rows, where nothing is admitted and nothing ends."""
    target, draft = (copy.deepcopy(m).cuda() for m in tunable_pair(0.3))
    decoder = SpeculativeDecoder(target, draft, num_drafts=3, graph_bytes=int(graphs) << 30)
    scheduler = Scheduler(decoder, rows=2, max_length=200, async_scheduling=True)
    for i, text in enumerate(prompts(2, 4, 9)):
        scheduler.submit(Request(text, 150, SamplingParams(0.9), seed=i, eos_token_id=[]))
    for _ in range(6):
        scheduler.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        emitted = [scheduler.step() for _ in range(8)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(map(len, emitted)) == 16
    scheduler.close()


@pytest.mark.parametrize("async_scheduling", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_k_that_adapts(async_scheduling, monkeypatch):
    """Every K has its graphs, and a step counts for the time of its K once it is a replay and nothing else."""
    target, draft = tunable_pair(0.3)
    asked = requests((None, SamplingParams(0.7)), new=40)
    plain, _ = texts_of(SpeculativeDecoder(target, None, 0), asked, rule="coupled")
    timed, took = [], StepTimes.took
    monkeypatch.setattr(StepTimes, "took", lambda self, k, *more: timed.append(k) or took(self, k, *more))
    decoder, graphs = SpeculativeDecoder(target, draft, AdaptiveDrafts(max_drafts=4)), recorded_graphs()
    texts, scheduler = texts_of(decoder, asked, graphs, async_scheduling, rule="coupled")
    assert {i: text[:2] for i, text in texts.items()} == {i: text[:2] for i, text in plain.items()}
    taken = Stats.total((stats for _, _, stats in texts.values()), 4).steps_by_drafts
    assert sum(count > 0 for count in taken) >= 3
    assert len(timed) == graphs.replays - len(graphs) > 20


def test_without_memory_for_graphs_steps_count_as_they_are():
    graphs, seen = StepGraphs(budget=0, capture=record, allocated=lambda: 0), []
    for _ in range(5):
        with pytest.warns(RuntimeWarning) if len(seen) == 1 else nullcontext():
            graphs.run("a", lambda: torch.zeros(1) + 1)
        seen.append(graphs.settled)
    assert seen == [False, False, True, True, True]
    for _ in range(3):
        graphs.run("b", lambda: torch.zeros(1) + 1)
        seen.append(graphs.settled)
    assert seen[5:] == [False, True, True]
