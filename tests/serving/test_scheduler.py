"""A request's text depends on the request alone: not on its row, its neighbours, the order, or when it is read."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec import (
    EarlyExitDrafter,
    FinishReason,
    PromptLookupDrafter,
    Request,
    Scheduler,
    SpeculativeDecoder,
    SuffixDrafter,
)
from support.allocations import masked
from support.crowds import check_empty, finish
from support.models import prompts, tiny_model, tunable_pair

from specdec_kernels import SamplingParams

MAX_LENGTH, CHUNK = 40, 4


class After:
    """Ends every text after one of these tokens."""

    def __init__(self, *tokens: int):
        self.tokens = set(tokens)

    def first_end(self, sequence, text, new):
        return next((i + 1 for i, token in enumerate(text[len(text) - new :]) if token in self.tokens), None)


def mixed() -> list[Request]:
    """Everything that a request can ask for, side by side; prompts of one token and of several chunks."""
    settings = [
        {"params": SamplingParams(1.0), "max_new_tokens": 9},
        {"params": SamplingParams(0.8, top_k=20, top_p=0.9), "max_new_tokens": 7},
        {"max_new_tokens": 12, "eos_token_id": list(range(0, 40, 5))},
        {"params": SamplingParams(1.0, repetition_penalty=1.3, frequency_penalty=0.5), "max_new_tokens": 8},
        {"params": SamplingParams(0.7, min_p=0.05), "logit_bias": {3: 4.0}, "banned_tokens": [5, 6]},
        {"params": SamplingParams(1.0), "stop": After(*range(0, 101, 4)), "max_new_tokens": 20},
        {"params": SamplingParams(1.0, presence_penalty=1.0), "max_new_tokens": 1},
        {"max_new_tokens": 0},
    ]
    lengths = (1, 6, 13, 3, 9, 5, 2, 4)
    return [
        Request(prompts(1, n, n, seed=i)[0], **{"max_new_tokens": 6, "seed": 40 + i, "eos_token_id": [], **s})
        for i, (n, s) in enumerate(zip(lengths, settings, strict=True))
    ]


DRAFTERS = {
    "none": lambda target, draft: None,
    "model": lambda target, draft: draft,
    "unlike": lambda target, draft: tiny_model("llama", seed=9, layers=1),
    "early_exit": lambda target, draft: EarlyExitDrafter(target, 1),
    "lookup": lambda target, draft: PromptLookupDrafter(min_ngram=1),
    "suffix": lambda target, draft: SuffixDrafter(),
}


@functools.cache
def pair(kind: str):
    if kind == "llama":
        return tunable_pair(0.5, layers=1)
    return tiny_model(kind, layers=2), tiny_model(kind, layers=1)


def new_decoder(kind: str, drafter: str) -> SpeculativeDecoder:
    target, draft = pair(kind)
    return SpeculativeDecoder(target, DRAFTERS[drafter](target, draft), 3)


def alone(decoder: SpeculativeDecoder, request: Request, rule: str) -> list[int]:
    """Without a scheduler."""
    return decoder.generate(
        [request.prompt],
        None,
        request.max_new_tokens,
        request.params,
        request.seed,
        request.eos_token_id,
        rule=rule,
        logit_bias=request.logit_bias,
        banned_tokens=list(request.banned_tokens),
        min_new_tokens=request.min_new_tokens,
        stop=request.stop,
    ).tokens[0]


def run(decoder, requests, **arguments) -> list[list[int]]:
    """In the order of ``requests``."""
    s = Scheduler(decoder, **{"rows": 3, "max_length": MAX_LENGTH, "prefill_chunk": CHUNK, **arguments})
    numbers = [s.submit(request) for request in requests]
    outcomes = finish(s)
    usage = s.usage
    assert (usage.live, usage.prefilling, usage.waiting, usage.cache_tokens_used) == (0, 0, 0, 0)
    return [outcomes[n].tokens for n in numbers]


EVERYDAY = [
    ("llama", "model", "token"),
    ("llama", "model", "block"),
    ("llama", "model", "coupled"),
    ("llama", "early_exit", "token"),
    ("llama", "lookup", "token"),
    ("llama", "suffix", "block"),
    ("llama", "none", "token"),
    ("gemma3", "model", "token"),
    ("bloom", "model", "token"),
]
NIGHTLY = [
    (kind, drafter, rule)
    for kind in ("llama", "gemma3", "bloom")
    for drafter in DRAFTERS
    for rule in ("token", "block", "coupled")
    if (kind, drafter, rule) not in EVERYDAY and (kind == "llama" or drafter != "unlike")
]


@pytest.mark.parametrize(
    ("kind", "drafter", "rule"), [*EVERYDAY, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY)]
)
def test_the_same_text_alone_in_a_crowd_and_in_another_order(kind, drafter, rule):
    decoder, requests = new_decoder(kind, drafter), mixed()
    texts = [alone(decoder, request, rule) for request in requests]
    assert run(decoder, requests, rule=rule) == texts
    assert run(decoder, requests[::-1], rule=rule, async_scheduling=True, rows=2)[::-1] == texts
    ends = {len(text) == request.max_new_tokens for text, request in zip(texts, requests, strict=True)}
    assert ends == {False, True}  # some ended before


@pytest.mark.parametrize("rule", ("token", "block", "coupled"))
def test_ends_and_shortest_lengths_of_each_sequence(rule):
    """Ends are tokens that would come at once. Each sequence holds back its own, and emits those of its neighbours, of
    which some hold back what it emits."""
    decoder = new_decoder("llama", "model")
    prompted = [Request([5, 6, 7], 10, SamplingParams(1.0), seed=i, eos_token_id=[]) for i in range(4)]
    prompted[3] = replace(prompted[3], params=None)
    free = [alone(decoder, request, rule) for request in prompted]
    shortest = (0, 3, 5, 4)
    requests = [
        replace(request, eos_token_id=text[:4], min_new_tokens=n)
        for request, text, n in zip(prompted, free, shortest, strict=True)
    ]
    texts = [alone(decoder, request, rule) for request in requests]
    for request, text, without in zip(requests, texts, free, strict=True):
        ends, n = {*request.eos_token_id}, request.min_new_tokens
        assert len(text) > n and not ends & {*text[:n]} and (text == without[:1]) == (n == 0)
    others = [Request([8], 10, SamplingParams(1.0), 9, text[:5], min_new_tokens=10) for text in texts]
    for rows in (1, 8):
        assert run(decoder, [*requests, *others], rule=rule, rows=rows)[:4] == texts
    assert run(decoder, [*others, *requests[::-1]], rule=rule, rows=5, async_scheduling=True)[:3:-1] == texts


def test_beside_others_and_alone_in_one_row():
    """One after the other in one row, and each beside copies of another request."""
    decoder, requests = new_decoder("llama", "model"), mixed()
    texts = run(decoder, requests, rows=1)
    assert texts == run(decoder, requests, rows=8)
    for i in (0, 3):
        other = requests[1 + i]
        crowd = [other, other, requests[i], other]
        expected = [texts[1 + i], texts[1 + i], texts[i], texts[1 + i]]
        assert run(decoder, crowd, rows=4, async_scheduling=True) == expected


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 64])
def test_prompts_are_read_in_parts_that_depend_on_nothing_else(chunk):
    """Lengths around the chunk; every part of a prompt ends where it does without neighbours."""
    decoder = new_decoder("llama", "model")
    lengths = sorted({1, 2, chunk, chunk + 1, chunk + 2, 2 * chunk + 1, 12} - set(range(30, 200)))
    requests = [Request(prompts(1, n, n, seed=n)[0], 3) for n in lengths]
    parts, extend = [], decoder.target.extend

    def counted(cache, sequences, starts, *more):
        parts.append((starts[0], tuple(sequences[0])))
        extend(cache, sequences, starts, *more)

    decoder.target.extend = counted
    texts = run(decoder, requests, prefill_chunk=chunk, rows=4)
    parts.remove((0, (0,)))  # a token that showed what a cache of this model holds
    expected = {
        (start, tuple(request.prompt[: min(start + chunk, n - 1)]))
        for request, n in zip(requests, lengths, strict=True)
        for start in range(0, n - 1, chunk)
    }
    assert set(parts) == expected and len(parts) == len(expected)
    assert texts == [alone(decoder, request, "token") for request in requests]


def test_settings_of_the_scheduler_are_read():
    decoder = new_decoder("llama", "model")
    for name, value in (("rows", 0), ("prefill_chunk", 0), ("max_waiting", 0), ("max_waiting", True), ("rows", 2.0)):
        with pytest.raises(ValueError, match=f"^{name}: got {value}, allowed: an integer >= 1"):
            Scheduler(decoder, **{"max_length": MAX_LENGTH, name: value})
    with pytest.raises(ValueError, match="^max_length: got 257, allowed: .*256"):
        Scheduler(decoder, max_length=257)
    with pytest.raises(ValueError, match="^rule: "):
        Scheduler(decoder, max_length=MAX_LENGTH, rule="best")


requests = st.lists(st.tuples(st.integers(1, 14), st.integers(0, 5), st.integers(0, 12)), min_size=1, max_size=9)


def check_bookkeeping(shape, rows, chunk, async_scheduling, drafter):
    """``shape``: of each request its prompt's length, its new tokens, and the step after which it is cancelled (from
    10 on: it is not)."""
    decoder = new_decoder("llama", drafter)
    read, extend = [], decoder.target.extend

    def counted(cache, sequences, starts, *more):
        read.append(len(sequences[0]) - starts[0])
        extend(cache, sequences, starts, *more)

    decoder.target.extend = counted
    bounds = {"rows": rows, "max_length": 20, "prefill_chunk": chunk, "max_waiting": 9}
    s = Scheduler(decoder, **bounds, async_scheduling=async_scheduling)
    read.clear()
    cancelled, admitted = set(), []
    for n, new, _ in shape:
        s.submit(Request([7] * n, new))

    def between(step, updates):
        usage = s.usage
        in_rows = sorted((r for r in s.batch.sequences if r is not None), key=lambda r: r.number)
        assert usage.cache_tokens_used == sum(sequence.slots for sequence in in_rows)
        assert usage.live + usage.prefilling <= rows
        assert sum(read) < 2 * chunk
        read.clear()
        admitted.extend(r.number for r in in_rows if r.number not in admitted)
        for number, (_, _, when) in enumerate(shape):
            if when == step < 10 and s.cancel(number):
                cancelled.add(number)

    outcomes = finish(s, between)
    assert sorted(outcomes) == list(range(len(shape)))
    assert {n for n, o in outcomes.items() if o.finish_reason == FinishReason.CANCELLED} == cancelled
    assert admitted == sorted(admitted)
    for number, (n, new, _) in enumerate(shape):
        if number not in cancelled:
            assert outcomes[number].finish_reason == FinishReason.LENGTH
            assert outcomes[number].tokens == plain(n)[:new]
    usage = s.usage
    assert (usage.live, usage.prefilling, usage.waiting, usage.cache_tokens_used) == (0, 0, 0, 0)
    assert 0 <= usage.busy <= 1


@functools.cache
def plain(n: int) -> list[int]:
    return new_decoder("llama", "none").generate([[7] * n], max_new_tokens=5, eos_token_id=[]).tokens[0]


@settings(max_examples=8, deadline=None, derandomize=True)
@given(requests, st.integers(1, 3), st.integers(1, 8), st.booleans())
def test_nothing_is_promised_twice_or_lost(shape, rows, chunk, async_scheduling):
    check_bookkeeping(shape, rows, chunk, async_scheduling, "none")


@pytest.mark.nightly
@settings(max_examples=400, deadline=None)
@given(requests, st.integers(1, 4), st.integers(1, 8), st.booleans(), st.sampled_from(list(DRAFTERS)))
def test_nothing_is_promised_twice_or_lost_for_long(shape, rows, chunk, async_scheduling, drafter):
    check_bookkeeping(shape, rows, chunk, async_scheduling, drafter)


def test_rows_are_filled_while_others_decode():
    """A prompt of many chunks delays nobody: the others get tokens in every step."""
    s, prefilling = Scheduler(new_decoder("llama", "none"), rows=2, max_length=64, prefill_chunk=2), []
    first, second = s.submit(Request([1, 2], 24)), Request(list(range(30)), 2)

    def between(step, updates):
        if step == 0:
            s.submit(second)
        prefilling.append(s.usage.prefilling)
        assert first in [u.number for u in updates]

    finish(s, between)
    assert prefilling[:16] == [0] + [1] * 14 + [0]
    check_empty(s)


@pytest.mark.parametrize("async_scheduling", (False, True))
def test_steps_count_for_who_decodes(async_scheduling):
    """Not for who has a row, while its prompt is read: plainly, each step of a text emits a token of it."""
    decoder = SpeculativeDecoder(tiny_model(), None, 0)
    asked = [Request(text, 6, id=i) for i, text in enumerate(prompts(5, 20, 40))]
    scheduler = Scheduler(decoder, rows=3, max_length=60, prefill_chunk=8, async_scheduling=async_scheduling)
    ended = list(scheduler.run(asked))
    assert [(s.stats.steps, s.stats.emitted) for s in ended] == [(6, 6)] * 5
    assert scheduler.batch.steps > 2 * 6  # so some began while others decoded


def test_a_step_that_is_launched_ahead_sees_what_the_one_before_wrote(monkeypatch):
    """Where the text outgrows the 64 slots that attention reads, the host does not know it yet."""
    masked(monkeypatch)
    target, draft = tunable_pair(0.0, layers=1)
    decoder = SpeculativeDecoder(target, draft, 4)
    asked = [Request(text, 9, SamplingParams(1.0), seed=i, id=i) for i, text in enumerate(prompts(6, 60, 60))]

    def texts(async_scheduling: bool) -> dict:
        scheduler = Scheduler(decoder, rows=6, max_length=90, async_scheduling=async_scheduling)
        return {outcome.request.id: outcome.tokens for outcome in scheduler.run(asked)}

    assert texts(async_scheduling=True) == texts(async_scheduling=False)
