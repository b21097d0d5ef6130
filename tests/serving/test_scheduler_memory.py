"""A scheduler's caches are within its budget, its promises come back, and memory that runs out costs no text."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from specdec import SpeculativeDecoder
from specdec.loop.request import Request
from specdec.result import FinishReason
from specdec.serving.scheduler import Scheduler
from support.allocations import LittleMemory, allocated, masked
from support.models import prompts, tiny_model

BOTH = 256 + 512  # bytes of a token: the target's, the draft's


def decoder(num_drafts: int = 2) -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_model("llama"), tiny_model("gpt2", 1), num_drafts)


@pytest.mark.parametrize("seed", range(2))
def test_promises_come_back(seed):
    """Random requests, cancelled wherever they are: the promises are those of the rows at every step."""
    rng = random.Random(seed)
    scheduler, needs, ended = Scheduler(decoder(), rows=3, max_length=60, prefill_chunk=8), {}, {}
    for _ in range(60):
        if len(needs) < 12 and rng.random() < 0.7:
            prompt, new = prompts(1, 1, 30, seed=rng.randrange(99))[0], rng.randrange(20)
            needs[scheduler.submit(Request(prompt, new, eos_token_id=[rng.randrange(101)]))] = len(prompt) + new
        if needs and rng.random() < 0.3:
            scheduler.cancel(rng.choice(list(needs)))
        ended |= {u.number: u for u in scheduler.step() if u.finish_reason is not None}
        held = {sequence.number: sequence.slots for sequence in scheduler.batch.sequences if sequence is not None}
        assert scheduler.usage.cache_tokens_used == sum(held.values()) <= scheduler.usage.cache_tokens
        assert all(needs[number] == need for number, need in held.items())
    scheduler.close()
    ended |= {u.number: u for u in scheduler.step() if u.finish_reason is not None}
    assert sorted(ended) == sorted(needs) and scheduler.usage.cache_tokens_used == 0
    assert {FinishReason.CANCELLED, FinishReason.LENGTH} <= {o.finish_reason for o in ended.values()}


def test_allocated_at_once_within_the_budget(caches):
    scheduler = Scheduler(decoder(), rows=3, cache_bytes=3 * 41 * BOTH + 100)
    storages = [storages for _, storages in caches if storages[0][1] > 2 * 64 * 2]  # no measuring
    assert scheduler.budget.max_length == 40 and scheduler.max_length == 40
    assert sum(size for each in storages for _, size in each) == scheduler.budget.bytes == 3 * 41 * BOTH
    requests = [Request(p, 12, eos_token_id=[]) for p in prompts(9, 1, 28)]
    outcomes = list(scheduler.run([*requests, Request([1] * 30, 11)]))
    assert sorted(o.number for o in outcomes) == [-1, *range(9)]
    assert outcomes[[o.number for o in outcomes].index(-1)].error.endswith("allowed: 40 tokens together")
    assert [allocated(cache) for cache, _ in caches] == [each for _, each in caches]
    assert (scheduler.usage.cache_tokens, scheduler.usage.cache_tokens_used) == (120, 0)


def test_what_does_not_fit_is_refused_with_the_numbers(caches):
    both = decoder()
    with pytest.raises(ValueError, match="cache_bytes: got 94463 .*>= 94464 .* for 3 rows of 41 slots"):
        Scheduler(both, rows=3, max_length=40, cache_bytes=3 * 41 * BOTH - 1)
    with pytest.raises(ValueError, match="cache_tokens: got 122, allowed: >= 123 for 3 rows of 41 slots"):
        Scheduler(both, rows=3, max_length=40, cache_tokens=122)
    with pytest.raises(ValueError, match="max_length: got 257, allowed: <= 256, the positions of the target"):
        Scheduler(both, rows=3, max_length=257)
    assert all(cache.capacity == 2 for cache, _ in caches)
    assert Scheduler(both, rows=None, max_length=40, cache_tokens=170).usage.rows == 4
    assert Scheduler(decoder(0), rows=3, cache_bytes=3 * 41 * BOTH).budget.max_length == 122  # no draft's cache


def test_a_draft_with_fewer_positions_has_fewer_slots(caches):
    """What it does not need is there for longer texts; those that it can draft for to the end cost what they did."""
    draft = copy.deepcopy(tiny_model("gpt2", 1))
    draft.config.n_positions = 64
    short = SpeculativeDecoder(tiny_model("llama"), draft, 2)
    row = 101 * 256 + 65 * 512
    scheduler = Scheduler(short, rows=3, cache_bytes=3 * row)
    assert scheduler.max_length == 100 and scheduler.budget.bytes == 3 * row
    assert sum(size for cache, each in caches if cache.capacity > 2 for _, size in each) == scheduler.budget.bytes
    assert Scheduler(short, rows=3, max_length=200).budget.bytes == 3 * (201 * 256 + 65 * 512)
    assert Scheduler(short, rows=3, cache_bytes=3 * 41 * BOTH).max_length == 40
    assert Scheduler(short, rows=3, max_length=64).budget.bytes == 3 * 65 * BOTH


@pytest.mark.parametrize("which", ("target", "draft"))
def test_memory_that_runs_out_in_prefill_costs_no_text(which, monkeypatch):
    """The last layer of one of the models runs out on more than 8 tokens at once; it goes on in halves."""
    masked(monkeypatch)
    requests = [Request(p, 5, eos_token_id=[], seed=i) for i, p in enumerate(prompts(4, 20, 50))]

    def texts(both: SpeculativeDecoder) -> list[list[int]]:
        outcomes = Scheduler(both, rows=2, max_length=100, prefill_chunk=32).run(requests)
        return [o.tokens for o in sorted(outcomes, key=lambda o: o.number)]

    expected, both = texts(decoder()), decoder()
    for model in (both.target, both.drafter.model):
        model.slot_bytes()  # measured before the fault
    little = LittleMemory(8 * 64)
    model = both.target if which == "target" else both.drafter.model
    layer = model.model.model.layers[-1].self_attn if which == "target" else model.model.transformer.h[-1].attn
    handle = layer.register_forward_pre_hook(little.before, with_kwargs=True)
    try:
        with pytest.warns(RuntimeWarning, match="out of memory in prefill: . tokens a forward instead of 3"):
            assert texts(both) == expected
    finally:
        handle.remove()
    assert 4 <= model.prefill_chunk.size == max(t for t, s in little.seen if t * s <= 8 * 64) <= 8


def test_memory_that_never_suffices_ends_the_request_alone(monkeypatch):
    """One prompt is too long for its attention, even token by token."""
    masked(monkeypatch)
    both = decoder(0)
    both.target.slot_bytes()
    little = LittleMemory(99)
    handle = both.target.model.model.layers[-1].self_attn.register_forward_pre_hook(little.before, with_kwargs=True)
    scheduler = Scheduler(both, rows=2, max_length=100)
    requests = [Request(p, 8, eos_token_id=[]) for p in prompts(2, 20, 30)] + [Request([1] * 80, 8, eos_token_id=[])]
    try:
        with pytest.warns(RuntimeWarning, match="1 tokens a forward instead of"):
            outcomes = sorted(scheduler.run([requests[0], requests[2], requests[1]]), key=lambda o: o.number)
    finally:
        handle.remove()
    assert [o.finish_reason for o in outcomes] == [FinishReason.LENGTH, FinishReason.FAILED, FinishReason.LENGTH]
    assert outcomes[1].error.startswith("OutOfMemoryError") and scheduler.usage.cache_tokens_used == 0
    assert [o.tokens for o in Scheduler(decoder(0), rows=2, max_length=100).run(requests[:1])] == [outcomes[0].tokens]


def test_a_narrow_cache():
    both = SpeculativeDecoder(tiny_model("llama"), tiny_model("gpt2", 1), 2, cache_dtype=torch.bfloat16)
    scheduler = Scheduler(both, rows=2, cache_bytes=2 * 41 * BOTH // 2)
    assert scheduler.budget.max_length == 40
    (outcome,) = scheduler.run([Request([1, 2, 3], 20, eos_token_id=[])])
    assert [outcome.tokens] == both.generate([[1, 2, 3]], max_new_tokens=20, eos_token_id=[]).tokens
