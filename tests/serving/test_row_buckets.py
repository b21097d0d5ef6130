"""Where K adapts to the batch, a step has the rows in use and few others, so that K follows the load."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from specdec import (
    AdaptiveDrafts,
    PromptLookupDrafter,
    Request,
    Scheduler,
    SpeculativeDecoder,
    SuffixDrafter,
    load_embedded_head,
    load_embedded_pair,
)
from specdec.drafters.model import model_drafter
from specdec.drafters.predicted import PredictedDrafter
from specdec.loop import batch
from specdec.loop import rows as loop_rows
from specdec.loop.draft_length import PAUSE, AdaptiveK
from specdec.loop.graphs import StepGraphs
from specdec.loop.rows import PATIENCE, RowBuckets
from specdec.models.forward.cached_model import CachedModel
from specdec.models.supported import cached_model
from support.crowds import finish
from support.models import prompts, tunable_pair
from support.recorded import record
from transformers import PreTrainedModel

from specdec_kernels import SamplingParams, Status, validation

ROWS = 16


@pytest.mark.parametrize(
    ("size", "factor", "sizes"),
    [(1, 2, [1]), (6, 2, [1, 2, 4, 6]), (16, 2, [1, 2, 4, 8, 16]), (16, 4, [1, 4, 16]), (20, 4, [1, 4, 16, 20])],
)
def test_numbers_of_rows(size, factor, sizes):
    """The smallest that is enough; a smaller one than before only once it has been enough for a while."""
    rows = RowBuckets(size, factor)
    assert [rows.next(used) for used in range(1, size + 1)] == [
        min(n for n in sizes if n >= u) for u in range(1, size + 1)
    ]
    smallest = [rows.next(1) for _ in range(2 * PATIENCE)]
    assert smallest == [size] * PATIENCE + [1] * PATIENCE
    flapping = [rows.next(size if i % 2 else 1) for i in range(1, 2 * PATIENCE)]
    assert flapping == [size] * len(flapping)


# ---- shapes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fed(monkeypatch) -> list[int]:
    """The numbers of rows of decoding forwards."""
    sizes, forward = [], CachedModel.__call__

    def call(self, tokens, cache, layout):
        sizes.append(len(tokens))
        return forward(self, tokens, cache, layout)

    monkeypatch.setattr(CachedModel, "__call__", call)
    return sizes


def request(i: int, new: int = 30, **more) -> Request:
    return Request(prompts(1, 3, 12, seed=i)[0], **{"max_new_tokens": new, "seed": i, "eos_token_id": [], **more})


SAMPLED = {"params": SamplingParams(1.0)}


@pytest.mark.parametrize(
    ("num_drafts", "settings", "rows"),
    [
        (AdaptiveDrafts(), {}, 1),
        (AdaptiveDrafts(), SAMPLED, ROWS),  # the text of a seed is the same among any neighbours
        (3, {}, ROWS),
    ],
)
def test_forwards_have_the_rows_in_use_where_k_adapts(num_drafts, settings, rows, fed):
    scheduler = Scheduler(SpeculativeDecoder(*tunable_pair(0.3), num_drafts), rows=ROWS, max_length=60)
    scheduler.submit(request(0, **settings))
    finish(scheduler)
    assert {*fed} == {rows}
    if rows == 1:
        fed.clear()
        for i in range(3):
            scheduler.submit(request(i, 4 + 2 * i, **settings))
        finish(scheduler)
        assert {*fed} == {4} or {*fed} == {4, 2, 1}


# ---- texts -----------------------------------------------------------------------------------------------------


class Shows:
    """A processor that depends on the text alone: it bans the last token, and from a text of ``length`` tokens on it
    returns what is no distribution."""

    def __init__(self, length: int = 10**9):
        self.length = length

    def __call__(self, input_ids, scores):
        scores = scores.scatter(1, input_ids[:, -1:], -torch.inf)
        return scores if input_ids.shape[1] < self.length else scores * torch.nan


class After:
    """Ends a text after its first token that is a multiple of seven."""

    def first_end(self, sequence, text, new):
        return next((i + 1 for i, token in enumerate(text[len(text) - new :]) if token % 7 == 0), None)


def arrivals(plain: bool, temperature: float, prediction: list[int] | None) -> dict[int, list[Request]]:
    """Requests by the step before which they come. The rows in use become more and fewer, twice; one of the sequences
    lives long in a high row.

    Args:
        plain: only what a step that runs ahead of the host can do.
    """
    warm = SamplingParams(temperature)
    come = {
        0: [request(0, 84, params=warm, num_drafts=1)],
        6: [request(1, 4, log_probs=True, params=SamplingParams(temperature, top_k=20, top_p=0.9)), request(2, 12)],
        14: [
            request(3, 5),
            request(4, 3, params=warm),
            request(5, 22, min_new_tokens=9, eos_token_id=[*range(0, 64, 8)]),
            request(8, 20),
            request(9, 6),
        ],
        34: [request(6, 30), request(7, 9, num_drafts=0)],
    }
    if not plain:
        changed = SamplingParams(temperature, repetition_penalty=1.3, frequency_penalty=0.4)
        come[3] = [request(10, 8, params=changed), request(11, 20, logits_processor=[Shows(15)], top_log_probs=2)]
        come[16] = [request(12, 12, prediction=prediction), request(13, 30, stop=After(), logit_bias={3: 2.0})]
        come[36] = [request(14, 10, params=changed, logits_processor=[Shows()]), request(15, 14, top_log_probs=1)]
    return come


def run(scheduler: Scheduler, come: dict[int, list[Request]]) -> tuple[list[list], list[int]]:
    """Returns what came of the requests in the order of their arrival, and the number of rows of each step."""
    numbers, counts = [], []

    def between(step: int, updates: list) -> None:
        counts.append(scheduler.batch.rows.count)
        numbers.extend(scheduler.submit(r) for r in come.get(step + 1, []))

    numbers.extend(scheduler.submit(r) for r in come[0])
    outcomes = finish(scheduler, between)
    found = [outcomes[number] for number in numbers]
    assert scheduler.drafter_error is None and len(found) == sum(map(len, come.values()))
    told = [[o.tokens, o.finish_reason, o.status & Status.TARGET_FAULTS, o.log_probs, o.raw_log_probs] for o in found]
    return told, counts


@functools.cache
def embedded():
    target, draft, _ = load_embedded_pair()
    return target, draft


def tiny(make: Callable = lambda target, draft: draft):
    target, draft = tunable_pair(0.3, layers=1)
    return target, make(target, draft)


CASES = {
    "model": (tiny, None, {}),
    "unsure model": (tiny, None, {"confidence": 0.2}),
    "lookup": (lambda: tiny(lambda *_: PromptLookupDrafter(min_ngram=1)), None, {}),
    "suffix": (lambda: tiny(lambda *_: SuffixDrafter()), None, {}),
    "nothing": (lambda: tiny(lambda *_: None), None, {}),
    "head": (lambda: (embedded()[0], load_embedded_head("eagle3", embedded()[0])), None, {}),
    "embedded": (embedded, None, {}),
    "tree": (tiny, 6, {}),
    "lookup tree": (lambda: tiny(lambda *_: PromptLookupDrafter(min_ngram=1)), 6, {}),
    "suffix tree": (lambda: tiny(lambda *_: SuffixDrafter()), 6, {}),
    "head tree": (lambda: (embedded()[0], load_embedded_head("medusa", embedded()[0])), 6, {}),
}


EVERYDAY = [
    ("model", "greedy"), ("suffix tree", "greedy"), ("lookup", "coupled"), ("tree", "coupled"), ("model", "ahead"),
    ("nothing", "ahead"), ("model", "graphs"),
]  # fmt: skip
NIGHTLY = [(case, how) for case in CASES for how in ("greedy", "coupled", "ahead") if (case, how) not in EVERYDAY]


@pytest.mark.parametrize(
    ("case", "how"), [*EVERYDAY, *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in NIGHTLY)]
)
@pytest.mark.filterwarnings("ignore:a sequence drafts no more")  # what has no distribution for the target has none here
def test_texts_do_not_depend_on_the_rows_of_a_step(case, how, monkeypatch):
    """They are those of steps that all have all rows, with a fixed K."""
    monkeypatch.setattr(loop_rows, "PATIENCE", 1)
    models, nodes, settings = CASES[case]
    target, drafter = models()
    if not nodes and how not in ("ahead", "graphs"):
        if isinstance(drafter, PreTrainedModel):
            drafter, settings = model_drafter(drafter, cached_model(target, "target"), **settings), {}
        drafter = PredictedDrafter(drafter)
    temperature = 0.0 if how == "greedy" else 0.8
    texts = Scheduler(SpeculativeDecoder(target, None, 0), rows=1, max_length=100)
    texts.submit(request(12, 12))
    prediction = None if nodes else [*finish(texts)[0].tokens[:8], 1, 2]
    come = arrivals(how in ("ahead", "graphs"), temperature, prediction)
    graphs = StepGraphs(capture=record, allocated=lambda: 0) if how == "graphs" else None
    if graphs is not None:  # nor are values read on a GPU
        monkeypatch.setattr(validation, "check_counts", lambda *values: None)
    found = []
    for num_drafts in (3, AdaptiveDrafts(3)):
        decoder = SpeculativeDecoder(target, drafter, num_drafts, tree=nodes, **settings)
        async_scheduling, most = how == "ahead", {"rows": 6, "max_length": 100, "prefill_chunk": 8, "rule": "coupled"}
        scheduler = Scheduler(decoder, async_scheduling=async_scheduling, **most)
        if num_drafts != 3:
            scheduler.batch.config = replace(scheduler.batch.config, graphs=graphs)
        found.append(run(scheduler, come))
    (expected, all_rows), (ours, counts) = found
    assert graphs is None or graphs.replays > 10
    assert {*all_rows} == {6} and {*counts} >= {1, 2, 4, 6}
    assert counts != sorted(counts) and counts != sorted(counts, reverse=True)
    for own, other in zip(ours, expected, strict=True):
        assert own[:3] == other[:3]
        for a, b in zip(own[3:], other[3:], strict=True):
            assert (a is None) == (b is None) and a == (b if b is None else pytest.approx(b, abs=1e-4))


def test_other_rows_are_left_alone():
    """Their state and their keys, which a prompt that is being read stores."""
    target, draft = tunable_pair(0.3)
    scheduler = Scheduler(SpeculativeDecoder(target, draft, AdaptiveDrafts()), rows=4, max_length=60, prefill_chunk=2)
    batch = scheduler.batch
    scheduler.submit(request(0))
    scheduler.submit(Request(prompts(1, 20, 20)[0], 4, eos_token_id=[]))
    for _ in range(9):
        scheduler.step()
    assert scheduler.usage.live == scheduler.usage.prefilling == 1 and batch.rows.count == 1
    storage = batch.state.target_cache.storage()
    before = [states[1:].clone() for states in storage], batch.rows._integers[:, 1:].clone()
    own = storage[0][0].clone()
    assert all(states[0].any() for states in before[0])
    with torch.inference_mode():
        for _ in range(3):
            batch.step()
    assert all(torch.equal(states[1:], old) for states, old in zip(storage, before[0], strict=True))
    assert torch.equal(batch.rows._integers[:, 1:], before[1]) and not torch.equal(storage[0][0], own)


# ---- K ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["in_time", "async_scheduling"])
def test_k_follows_the_load(async_scheduling, monkeypatch):
    """With simulated times: a draft costs little in a step of one row, and as much as a plain step in one of all."""
    monkeypatch.setattr(AdaptiveK, "_count_catching_up", lambda self, seconds: None)
    decoder = SpeculativeDecoder(*tunable_pair(0.0), AdaptiveDrafts())
    scheduler = Scheduler(decoder, rows=ROWS, max_length=256, async_scheduling=async_scheduling)
    b, launched = scheduler.batch, []
    step = b.runner.run
    monkeypatch.setattr(
        b.runner, "run", lambda plan: launched.append((len(plan.allowed), plan.num_drafts)) or step(plan)
    )

    class Timer:
        def __init__(self, device):
            pass

        def stop(self):
            rows, drafts = launched[-1]
            self.seconds = 1 + 0.1 * drafts if rows < ROWS else 4 + 4 * drafts

    monkeypatch.setattr(batch, "StepTimer", Timer)

    def steps(count: int, clients: int) -> list[tuple[int, int]]:
        """Each client asks for a text of 200 tokens after another."""
        del launched[:]
        while len(launched) < count:
            while (usage := scheduler.usage).live + usage.prefilling + usage.waiting < clients:
                numbers.append(scheduler.submit(request(len(numbers), 200)))
            scheduler.step()
        return launched[-20:]

    numbers: list[int] = []
    alone = steps(60, 1)
    assert {rows for rows, _ in alone} == {1} and sum(k > 0 for _, k in alone) >= 15
    full = steps(80, ROWS)
    assert {rows for rows, _ in full} == {ROWS} and sum(k > 0 for _, k in full) <= 4
    for number in numbers:
        scheduler.cancel(number)
    again = steps(PAUSE[0] + 30, 1)  # a pause may have begun just before
    assert {rows for rows, _ in again} == {1} and sum(k > 0 for _, k in again) >= 15
    one, all_rows = decoder.costs_of(1), decoder.costs_of(ROWS)
    assert one[1] == pytest.approx(1.1, abs=0.01) and all_rows[1] == pytest.approx(2.0, abs=0.01)
