"""What ends requests from outside: cancellation at any moment, forwards of all rows that fail, interrupts, full queues,
and sources of requests that fail."""

from __future__ import annotations

import dataclasses

import pytest
import specdec.loop.step
import torch
from specdec import FinishReason, QueueFull, Request
from specdec.drafters import Drafter, Drafts, DraftSession
from support.allocations import unrecorded
from support.crowds import (
    FAULTY,
    SAMPLED,
    Processor,
    Stop,
    alone,
    check_empty,
    crowd,
    decoder,
    finish,
    scheduler,
    texts,
)

# ---- cancellation -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _unrecorded(monkeypatch):
    unrecorded(monkeypatch)


def run_and_cancel(when, number: int = FAULTY, **settings):
    """Cancels after the first step for which ``when(scheduler, updates)``; the others are as without it."""
    s, answers = scheduler(**settings), []
    for request in crowd():
        s.submit(request)

    def between(step, updates):
        if not answers and when(s, updates):
            answers.append(s.cancel(number))
            assert s.cancel(number) is False  # twice

    if when(s, []):
        between(-1, [])
    outcomes = finish(s, between)
    assert len(answers) == 1
    for n, tokens in enumerate(texts()):
        if n != number:
            assert (outcomes[n].tokens, outcomes[n].finish_reason) == (tokens, FinishReason.LENGTH)
    text = outcomes[number].tokens
    assert text == texts()[number][: len(text)]
    check_empty(s)
    return answers[0], outcomes[number]


def emitted(number: int):
    seen = []

    def when(s, updates):
        seen.extend(u for u in updates if u.number == number)
        return len(seen) > 0

    return when


def in_prefill(s, updates) -> bool:
    return in_prefill_of(s, FAULTY)


def in_prefill_of(s, number: int) -> bool:
    return any(sequence.number == number and sequence.stored > 0 for sequence in s.batch.prompts.unread)


def test_cancelled_while_it_waits():
    assert run_and_cancel(lambda s, updates: True, number=4)[1].tokens == []


def test_cancelled_while_a_row_is_free_and_another_prompt_is_read():
    cancelled, outcome = run_and_cancel(
        lambda s, updates: in_prefill(s, updates) and None in s.batch.sequences, number=2
    )
    assert (cancelled, outcome.finish_reason, outcome.tokens) == (True, FinishReason.CANCELLED, [])


def test_cancelled_between_two_chunks_of_its_prompt():
    cancelled, outcome = run_and_cancel(in_prefill)
    assert (cancelled, outcome.finish_reason, outcome.tokens) == (True, FinishReason.CANCELLED, [])


def test_cancelled_between_two_chunks_with_nobody_behind_it():
    s = scheduler(rows=1)
    number = s.submit(crowd()[FAULTY])
    s.step()
    assert in_prefill_of(s, number) and s.cancel(number)
    outcomes = finish(s)
    assert (outcomes[number].finish_reason, outcomes[number].tokens) == (FinishReason.CANCELLED, [])
    check_empty(s)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_cancelled_while_it_decodes(async_scheduling):
    """Deferred: a step of its row is on its way, and the next request is admitted before that is read."""
    cancelled, outcome = run_and_cancel(emitted(FAULTY), async_scheduling=async_scheduling)
    assert cancelled and outcome.finish_reason == FinishReason.CANCELLED and 0 < len(outcome.tokens) < 9


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_cancelled_before_anything_was_told(async_scheduling):
    cancelled, outcome = run_and_cancel(
        lambda s, updates: FAULTY in {q.number for q in s.batch.decoding.values()},
        async_scheduling=async_scheduling,
    )
    assert cancelled and outcome.finish_reason == FinishReason.CANCELLED and (outcome.tokens == []) == async_scheduling


def test_a_cancelled_sequence_writes_no_more():
    """Its slots are those of the next prompt, which is read while others decode."""
    s, prompt = scheduler(rows=2), crowd()[FAULTY].prompt
    s.submit(Request([5, 6, 7, 8], 24))
    short, following = s.submit(Request([7], 20)), s.submit(Request(prompt, 5))
    when = emitted(short)
    outcomes = finish(s, lambda step, updates: when(s, updates) and s.cancel(short))
    assert outcomes[short].finish_reason == FinishReason.CANCELLED and outcomes[following].tokens == alone(prompt, 5)


def test_a_late_report_is_not_of_the_next_sequence():
    """The step on its way was the cancelled one's; the next is in its row before that step is read."""
    s, first = scheduler(rows=1, async_scheduling=True), Request([7], 20)
    number, following = s.submit(first), s.submit(Request([5, 6], 5))
    when = emitted(number)
    outcomes = finish(s, lambda step, updates: when(s, updates) and s.cancel(number))
    assert outcomes[number].finish_reason == FinishReason.CANCELLED and outcomes[following].tokens == alone([5, 6], 5)


def test_cancelled_after_its_last_token():
    cancelled, outcome = run_and_cancel(
        lambda s, updates: any(u.finish_reason is not None and u.number == FAULTY for u in updates)
    )
    assert (cancelled, outcome.finish_reason, outcome.tokens) == (False, FinishReason.LENGTH, texts()[FAULTY])


def test_unknown_numbers():
    s = scheduler()
    assert not any(map(s.cancel, (0, -1, 7, None, "0")))


def _by(where: str, call):
    """A decoder and requests that call ``call`` from inside of a step."""
    requests, with_decoder = crowd(), decoder()
    if where == "stop":
        requests[FAULTY] = dataclasses.replace(requests[FAULTY], stop=Stop(lambda new: call()))
    elif where == "processor":
        processor = Processor(lambda scores: call() or scores, 5)
        requests[FAULTY] = dataclasses.replace(requests[FAULTY], logits_processor=[processor])
    else:
        run = with_decoder.drafter.model.forwards.run
        model, calls = with_decoder.drafter.model, []

        def counted(module, *arguments, **named):
            calls.append(module)
            if len(calls) == 12:
                call()
            return run(module, *arguments, **named)

        model.forwards.run = counted
    return with_decoder, requests


@pytest.mark.parametrize("where", ["stop", "processor", "drafter"])
def test_cancelled_and_submitted_from_inside_of_a_step(where):
    """The first takes effect when the step has ended: its tokens still count."""
    answers = []

    def call():
        if not answers:
            answers.append(s.cancel(FAULTY))
            answers.append(s.submit(Request([5, 6, 7, 8], 2)))
            with pytest.raises(RuntimeError, match="step: called by what a step calls"):
                s.step()

    with_decoder, requests = _by(where, call)
    s = scheduler(with_decoder)
    for request in requests:
        s.submit(request)
    outcomes = finish(s)
    assert answers == [True, 5] and outcomes[5].finish_reason == FinishReason.LENGTH
    assert outcomes[FAULTY].finish_reason == FinishReason.CANCELLED
    text = outcomes[FAULTY].tokens
    assert text and text == texts()[FAULTY][: len(text)]
    assert [outcomes[n].tokens for n in (0, 2, 3, 4)] == [texts()[n] for n in (0, 2, 3, 4)]
    check_empty(s)


def test_close_ends_all():
    s = scheduler()
    for request in crowd():
        s.submit(request)
    outcomes = finish(s, lambda step, updates: step == 3 and s.close())
    assert {o.finish_reason for o in outcomes.values()} <= {FinishReason.CANCELLED, FinishReason.LENGTH}
    assert len(outcomes) >= 4
    check_empty(s)


# ---- what concerns all rows ---------------------------------------------------------------------------------

ERRORS = {
    "error": RuntimeError("bad step"),
    "out_of_memory": torch.OutOfMemoryError("bad step"),
    "interrupt": KeyboardInterrupt("bad step"),
}


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("where", ["target", "kernel"])
@pytest.mark.parametrize("error", ["error", pytest.param("out_of_memory", marks=pytest.mark.nightly), "interrupt"])
def test_a_step_that_fails_ends_what_decodes_and_nothing_else(error, where, async_scheduling, monkeypatch):
    error, with_decoder, calls = ERRORS[error], decoder(), []
    model = with_decoder.target
    decided, forward = specdec.loop.step.speculative_step, model.forwards.run

    def fails(call, *arguments, **named):
        calls.append(call)
        if len(calls) == 4:
            raise error
        return call(*arguments, **named)

    if where == "kernel":
        monkeypatch.setattr(specdec.loop.step, "speculative_step", lambda *a, **n: fails(decided, *a, **n))
    else:

        def run(call, *arguments, **named):
            if call is model.forwards.prompts:
                return fails(forward, call, *arguments, **named)
            return forward(call, *arguments, **named)

        model.forwards.run = run
    s = scheduler(with_decoder, async_scheduling=async_scheduling)
    for request in crowd():
        s.submit(request)
    outcomes, decoded = {}, set()
    while not s.idle:
        decoding = {q.number for q in s.batch.decoding.values()}
        try:
            updates = s.step()
        except KeyboardInterrupt:
            assert isinstance(error, KeyboardInterrupt)
            updates = []
        if len(calls) == 4 and not decoded:
            decoded = decoding
        outcomes |= {u.number: u.sequence for u in updates if u.finish_reason is not None}
    failed = {n for n, o in outcomes.items() if o.finish_reason == FinishReason.FAILED}
    whole = {n for n, o in outcomes.items() if o.finish_reason == FinishReason.LENGTH}
    assert 1 <= len(failed) < 5 and decoded <= failed | whole
    for number, outcome in outcomes.items():
        assert outcome.tokens == texts()[number][: len(outcome.tokens)]
        if number in failed:
            assert outcome.error == f"{type(error).__name__}: bad step" and outcome.status == 0
        else:
            assert (outcome.tokens, outcome.finish_reason) == (texts()[number], FinishReason.LENGTH)
    check_empty(s)


def test_interrupted_while_a_prompt_is_read():
    """The part is read again."""
    with_decoder, calls = decoder(), []
    model = with_decoder.target
    run = model.forwards.run

    def interrupted(module, *arguments, **named):
        calls.append(module)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(module, *arguments, **named)

    model.forwards.run = interrupted
    s = scheduler(with_decoder)
    for request in crowd():
        s.submit(request)
    with pytest.raises(KeyboardInterrupt):
        finish(s)
    outcomes = finish(s)
    assert [outcomes[n].tokens for n in range(5)] == texts()
    check_empty(s)


# ---- queues and sources -------------------------------------------------------------------------------------


def test_queue_overrun():
    s = scheduler(max_waiting=2)
    numbers = [s.submit(request) for request in crowd()[:2]]
    for _ in range(3):
        with pytest.raises(QueueFull, match="2 requests wait, allowed: 2"):
            s.submit(crowd()[2])

    def more(step, updates):
        if step == 0:
            numbers.extend(s.submit(request) for request in crowd()[2:4])

    outcomes = finish(s, more)
    assert numbers == [0, 1, 2, 3] and [outcomes[n].tokens for n in numbers] == texts()[:4]
    check_empty(s)


def test_a_source_that_fails_loses_nothing():
    """Its error comes through; what was drawn is brought by another run."""
    s = scheduler()

    def source():
        yield from crowd()[:4]
        raise OSError("disk")

    outcomes = {}
    with pytest.raises(OSError, match="disk"):
        for outcome in s.run(source()):
            outcomes[outcome.number] = outcome
    assert len(outcomes) < 4
    for outcome in s.run(()):
        outcomes[outcome.number] = outcome
    assert [outcomes[n].tokens for n in range(4)] == texts()[:4]
    check_empty(s)


def test_a_reader_that_leaves_loses_nothing():
    """Also where several requests end in one step."""
    s, request = scheduler(), Request([5, 6, 7, 8], 1)
    numbers = []
    while len(numbers) < 3:
        numbers.append(next(s.run([request] * 3 if not numbers else ())).number)
    assert sorted(numbers) == [0, 1, 2]
    assert list(s.run(())) == []


def test_refused_requests_come_back_and_small_queues_do():
    """Whatever is in the source: nothing that is there ends it, nor does a queue that is shorter than the rows."""
    s = scheduler(max_waiting=1)
    requests = [crowd()[0], None, Request([]), crowd()[1], Request([1], 40), 7, crowd()[2], Request([1], 0)]
    outcomes = list(s.run(iter(requests)))
    refused = [o for o in outcomes if o.number == -1]
    assert [o.request for o in refused] == [None, requests[2], requests[4], 7]
    assert all(o.finish_reason == FinishReason.FAILED and o.error.startswith("ValueError: ") for o in refused)
    taken = {o.number: o.tokens for o in outcomes if o.number >= 0}
    assert taken == {0: texts()[0], 1: texts()[1], 2: texts()[2], 3: []}
    check_empty(s)


def test_one_drafter_for_all_that_forgets_a_row():
    """-1 ends the drafts of a row; a drafter may answer with no columns at all."""

    class Sparse(Drafter, DraftSession):
        def start(self, batch):
            return self

        def propose(self, step):
            rows = step.position.shape[0]
            return Drafts(torch.full((rows, step.index % (step.num_drafts + 1)), -1, dtype=torch.int64))

    s = scheduler(decoder(Sparse()))
    for seed in range(4):
        s.submit(Request([1, 2, 3], 5, SAMPLED, seed))
    assert {o.finish_reason for o in finish(s).values()} == {FinishReason.LENGTH}
    check_empty(s)
