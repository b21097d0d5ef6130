"""What steps cost: a batch decodes with another K in every step, beside plain decoding, and each step is timed.

The steps are those of the loop itself, so their times have everything in them that a user waits for: forwards of target
and draft at each width, the kernels, and the loop's own work on the host.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from specdec_kernels import Rule, SamplingParams

from ...checks import read_count, refuse
from ...decoder import SpeculativeDecoder
from ...loop.batch import Batch
from ...loop.draft_length import DraftLength, RowResult, StepOutcome
from ...loop.request import Request
from ...loop.sequence import SequenceState
from ...loop.step import AcceptRule

Clock = Callable[[], float]
TURN = (2, 4)  # plain and speculative steps that take turns: the latter come in one kind for each K
FORWARDS = ("draft_forwards", "target_forwards")


class Sweep(DraftLength):
    """Takes the numbers of drafts in turns, and counts what becomes of the drafts. Each turn has another order: in one
    that repeats, a number could always come in the first step of a text, or where its end cuts drafts short, and then
    it would never be timed."""

    def __init__(self, widths: Sequence[int]):
        super().__init__(max(widths), max(widths))
        self.acceptance, self._turns = Acceptance(max(widths)), _turns(widths)

    def chooses(self, text_depends: bool) -> bool:
        return True

    def choose(self, rows: int, live: int, caps: Sequence[int]) -> int:
        return next(self._turns)

    def observe(self, step: StepOutcome) -> None:
        self.acceptance.record(step.results)


def _turns(widths: Sequence[int]) -> Iterator[int]:
    chance = random.Random(0)
    while True:
        yield from chance.sample(widths, len(widths))


def shortest_text(most_drafts: int) -> int:
    """Tokens of a text in which the second step still has room for that many drafts, whatever the first one emits."""
    return 2 * (most_drafts + 1)


@dataclass(frozen=True)
class Workload:
    """What is decoded while steps are timed.

    Attributes:
        prompts: they are taken in turns, again and again.
        tokens: new tokens of a text, at least ``shortest_text`` of the largest K.
        params: None is greedy.
        seed: of the first text; each has another one.
        least: texts that are begun whatever time they take: acceptance depends on the text.
    """

    prompts: Sequence[Sequence[int]]
    tokens: int
    params: SamplingParams | None = None
    rule: Rule = Rule.TOKEN
    seed: int = 0
    least: int = 1

    def texts(self, first: int, rows: int) -> list[Request]:
        """Returns what texts ``first`` to ``first + rows - 1`` are to be."""
        return [
            Request([*self.prompts[i % len(self.prompts)]], self.tokens, self.params, self.seed + i, eos_token_id=[])
            for i in range(first, first + rows)
        ]


@dataclass
class Times:
    """Seconds of steps of one width.

    Attributes:
        whole: of each step, as the caller of the loop sees it.
        parts: of these, those of the draft's and the target's forwards.
    """

    whole: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in FORWARDS})

    @property
    def median(self) -> float:
        return statistics.median(self.whole)

    def part(self, name: str) -> float:
        """The share of all steps' time, of the median step: so parts and the rest add up to it."""
        return self.median * sum(self.parts[name]) / sum(self.whole) if sum(self.whole) else 0.0


@dataclass
class Measured:
    """What was measured with one drafter, number of rows and sampling setting.

    Attributes:
        plain: steps without drafter.
        steps: steps by K, from 1 on.
        begins: seconds from the call to the first step, by whether there are drafts: prompts are read.
        tokens: that were emitted, of both.
    """

    rows: int
    acceptance: Acceptance
    plain: Times = field(default_factory=Times)
    steps: dict[int, Times] = field(default_factory=dict)
    begins: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    tokens: int = 0

    @property
    def known(self) -> bool:
        return bool(self.plain.whole) and bool(self.steps)

    def seconds(self, num_drafts: int) -> float:
        """Returns T(K), the median. Where a K was not timed, it is on the line between its neighbours: each draft adds
        one draft forward and one token to verify. Larger K never take less, since that would only be noise."""
        points = {0: self.plain.median, **{k: t.median for k, t in self.steps.items()}}
        return interpolated(points, num_drafts)

    def begin(self, drafts: bool) -> float:
        return statistics.median(self.begins[drafts]) if self.begins[drafts] else 0.0


def interpolated(points: Mapping[int, float], at: int) -> float:
    """Returns the value at ``at`` of the straight lines through ``points``, made not to fall; beyond the last point the
    last line goes on."""
    xs, so_far, ys = sorted(points), 0.0, []
    for x in xs:
        so_far = max(so_far, points[x])
        ys.append(so_far)
    if len(xs) == 1:
        return ys[0]
    i = next((i for i in range(1, len(xs)) if xs[i] >= at), len(xs) - 1)
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (at - xs[i - 1]) / (xs[i] - xs[i - 1])


class _Decoding:
    """One batch whose steps are timed one by one."""

    def __init__(
        self, decoder: SpeculativeDecoder, requests: Sequence[Request], rule: Rule, lengths: Sweep | None, clock: Clock
    ):
        self._clock, began, target = clock, clock(), decoder.target
        texts = {i: SequenceState.of(i, request, target, decoder.most_drafts) for i, request in enumerate(requests)}
        capacity = target.capacity(max(len(r.prompt) + r.max_new_tokens for r in requests))
        config = decoder.batch_config(len(requests), capacity, AcceptRule(rule), max_eos=0)
        self.batch = Batch(config if lengths is None else replace(config, num_drafts=lengths))
        self.batch.add(texts)
        self.batch.prefill()
        self.begin, self._steps, self._lengths = clock() - began, 0, lengths

    def step(self, measured: Measured) -> None:
        self.batch.timer.lap("loop")  # the time since its last step belongs to the other batch
        parts = self.batch.timer.seconds
        before, began = dict(parts), self._clock()
        outputs = self.batch.step()
        seconds, spent = self._clock() - began, {name: parts[name] - before[name] for name in parts}
        measured.tokens += sum(len(output.tokens) for output in outputs)
        if self._steps == 0:  # in it a drafter reads the prompts, and shapes come up for the first time
            self.begin += spent["prefill"]
            measured.begins[self._lengths is not None].append(self.begin)
        else:
            k = self.batch.num_drafts
            times = measured.plain if self._lengths is None else measured.steps.setdefault(k, Times()) if k else None
            if times is not None:
                times.whole.append(seconds)
                for name in FORWARDS:
                    times.parts[name].append(spent[name])
        self._steps += 1


@torch.inference_mode()
def measure(
    plain: SpeculativeDecoder,
    decoder: SpeculativeDecoder,
    work: Workload,
    rows: int,
    widths: Sequence[int],
    seconds: float,
    clock: Clock = time.perf_counter,
) -> Measured:
    """Decodes texts by ``plain`` and ``decoder`` in turns, ``rows`` at a time, until the time is over. There are
    fewer plain steps, and they end with the others.

    Args:
        decoder: with a fixed K, the largest of ``widths``.
        widths: K >= 1 that are timed.
        seconds: for which it goes on, and at least until each width was timed once and ``work.least`` texts are done.
        clock: for tests.

    Raises:
        ValueError: names the argument. Also: the drafter failed.
    """
    read_count("max_new_tokens", work.tokens, shortest_text(max(widths)))
    sweep, began, turn = Sweep(widths), clock(), 0
    measured = Measured(rows, sweep.acceptance)
    while True:
        requests = work.texts(turn * rows, rows)
        pair = [
            _Decoding(which, requests, work.rule, lengths, clock)
            for which, lengths in ((plain, None), (decoder, sweep))
        ]
        while pair[1].batch.live:
            for decoding, steps in zip(pair, TURN, strict=True):
                for _ in range(steps):
                    if decoding.batch.live:
                        decoding.step(measured)
            if (session := pair[1].batch.session) is not None and session.error is not None:
                refuse(
                    "drafter", f"{type(decoder.drafter).__name__}, which failed ({session.error})", "one that drafts"
                )
            done = (turn + (not pair[1].batch.live)) * rows >= work.least
            if done and clock() - began >= seconds and {*widths} <= {*measured.steps} and measured.plain.whole:
                return measured
        turn += 1


LIKE_BEFORE = 4.0  # tests that the position before counts for


class Acceptance:
    """Tests of drafts, counted by position. A draft that the drafter did not find counts as rejected, as it does for
    ``AdaptiveDrafts``: the step was paid for in vain."""

    def __init__(self, most_drafts: int):
        self.tested, self.accepted = [0] * most_drafts, [0] * most_drafts

    def record(self, results: Sequence[RowResult]) -> None:
        """Adds what the rows of a step came to. In a step that ends a sequence, drafts after its end say nothing."""
        for result in results:
            if result.ended:
                continue
            for i in range(min(result.accepted + 1, result.asked)):
                self.tested[i] += 1
                self.accepted[i] += i < result.accepted

    @property
    def alpha(self) -> float:
        """accepted / tested; 0 if nothing was tested."""
        return sum(self.accepted) / sum(self.tested) if sum(self.tested) else 0.0

    def by_position(self) -> list[float]:
        """Returns the chance that draft 1, 2, ... is accepted if those before it were. A position that was hardly ever
        tested is expected to be like the one before."""
        found: list[float] = []
        for tested, accepted in zip(self.tested, self.accepted, strict=True):
            if found:
                found.append((accepted + LIKE_BEFORE * found[-1]) / (tested + LIKE_BEFORE))
            else:
                found.append(accepted / tested if tested else 0.0)
        return found
