"""A crowd of requests for one scheduler, and checks that every run of it must pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from specdec import FinishReason, Output, Request, Scheduler, SequenceState, SpeculativeDecoder
from transformers import LogitsProcessor

from specdec_kernels import SamplingParams

from .models import prompts, tunable_pair

EPS = 0.5  # about half of the drafts are accepted
ROWS, CHUNK, NUM_DRAFTS, MAX_LENGTH = 3, 4, 3, 32
FAULTY = 1  # the request in which faults are injected: greedy, admitted at once, and its row is used again later
SAMPLED = SamplingParams(1.0)


def crowd() -> list[Request]:
    """Requests with prompts of 1 to 3 chunks, two more than there are rows."""
    lengths = (3, 11, 6, 9, 2)
    settings = (SAMPLED, None, SAMPLED, SAMPLED, None)
    news = (7, 9, 5, 6, 7)
    return [
        Request(prompts(1, n, n, seed=i)[0], new, params, seed=100 + i)
        for i, (n, params, new) in enumerate(zip(lengths, settings, news, strict=True))
    ]


def decoder(drafter=None, **settings) -> SpeculativeDecoder:
    """A decoder with this drafter; None: with the pair's draft model."""
    target, draft = tunable_pair(EPS, layers=1)
    return SpeculativeDecoder(target, draft if drafter is None else drafter, NUM_DRAFTS, **settings)


def scheduler(with_decoder: SpeculativeDecoder | None = None, **settings) -> Scheduler:
    settings = {"rows": ROWS, "prefill_chunk": CHUNK, "max_length": MAX_LENGTH, **settings}
    return Scheduler(with_decoder or decoder(), **settings)


def finish(
    scheduler: Scheduler, between: Callable[[int, list], None] = lambda step, outputs: None, steps: int = 300
) -> dict[int, SequenceState]:
    """Steps until no request is left; ``between`` is called after each step. Checks that a request's outputs add up to
    its tokens, and that only the last one has a finish reason."""
    told: dict[int, list[int]] = {}
    ended: dict[int, SequenceState] = {}
    for step in range(steps):
        outputs = scheduler.step()
        for output in outputs:
            assert isinstance(output, Output) and output.number not in ended
            assert output.tokens or output.finish_reason is not None
            told.setdefault(output.number, []).extend(output.tokens)
            if output.finish_reason is not None:
                assert output.finish_reason == output.sequence.finish_reason
                ended[output.number] = output.sequence
                check_outcome(output.sequence)
                assert output.sequence.tokens == told[output.number]
        between(step, outputs)
        if scheduler.idle:
            return ended
    raise AssertionError(f"not idle after {steps} steps: {scheduler.usage}")


def check_outcome(outcome: SequenceState) -> None:
    assert len(outcome.produced_by) == len(outcome.tokens) == outcome.stats.emitted <= outcome.request.max_new_tokens
    assert (outcome.finish_reason == FinishReason.FAILED) == (
        outcome.error is not None or bool(int(outcome.status) & 7)
    )
    if outcome.finish_reason == FinishReason.LENGTH:
        assert len(outcome.tokens) == outcome.request.max_new_tokens


def check_empty(scheduler: Scheduler) -> None:
    """Checks that no row and no token of the cache is lost, and that every row serves the next request correctly."""
    usage = scheduler.usage
    assert (usage.live, usage.prefilling, usage.waiting, usage.cache_tokens_used) == (0, 0, 0, 0)
    assert scheduler.idle and all(record is None for record in scheduler.batch.sequences) and 0 <= usage.busy <= 1
    request = Request([5, 6, 7, 8], 2)
    outcomes = list(scheduler.run([request] * usage.rows))
    assert [o.tokens for o in outcomes] == [alone(request.prompt, 2)] * usage.rows
    assert {(o.finish_reason, int(o.status)) for o in outcomes} == {(FinishReason.LENGTH, 0)}


@functools.cache
def _alone(prompt: tuple[int, ...], new: int) -> list[int]:
    return decoder().generate([list(prompt)], max_new_tokens=new, eos_token_id=[]).tokens[0]


def alone(prompt: Sequence[int], new: int) -> list[int]:
    """The greedy text without a scheduler."""
    return _alone(tuple(prompt), new)


@functools.cache
def texts(rule: str = "token", greedy: bool = False) -> list[list[int]]:
    """The texts of the crowd without any fault."""
    s = scheduler(rule=rule)
    for request in crowd():
        s.submit(all_greedy(request) if greedy else request)
    outcomes = finish(s)
    return [outcomes[number].tokens for number in range(len(outcomes))]


def all_greedy(request: Request) -> Request:
    return Request(request.prompt, request.max_new_tokens)


class Processor(LogitsProcessor):
    """A processor that, from the ``call``-th call on, does what it is told."""

    def __init__(self, answer, call: int = 1):
        self.answer, self.call, self.calls = answer, call, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls < self.call:
            return scores
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(scores)


class Stop:
    """A stop that ends nothing before its ``call``-th call, and then answers as it is told."""

    def __init__(self, answer, call: int = 2):
        self.answer, self.call, self.calls = answer, call, 0

    def first_end(self, sequence, text, new):
        self.calls += 1
        if self.calls < self.call:
            return None
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(new) if callable(self.answer) else self.answer
