"""Chooses the K of each step of a batch by learned acceptance and learned step times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from statistics import NormalDist

import numpy as np

from .acceptance import Acceptance, RowAcceptance
from .draft_length import AdaptiveDrafts, Remaining, RowResult
from .step_times import StepTimes

SHARE = 0.01  # of the time of plain steps that trials of drafts may lose
CREDIT = 8.0  # plain steps that trials may lose at once, after drafts that have won them
REST = 32  # plain steps after drafts that did not pay, at least, before they are tried again
READING_MEMORY = 0.99  # weight of older steps in the time that the drafter takes to read texts, and
FEWEST_STEPS = 50  # over which that time is spread, at least: much is read when a batch begins
MARGIN = 0.03  # by which drafts must be expected to win: what seems best is often so by chance; and
RETURN = 0.10  # after a pause, without a trial, since the drafter has to read what it missed
HOLD = 6  # steps for which a K is kept that was chosen twice, since choosing takes time
LOOK_AROUND = 16  # choices, after which one step has another K, so that its time stays known

_NORMAL = NormalDist()


class _State(Enum):
    DRAFTING = auto()
    TRIAL = auto()  # of drafts, after a pause
    PAUSED = auto()  # plain decoding


class Learned:
    """What a decoder has learned about batches of one size. Batches share it, one after another or at the same time.

    Attributes:
        times: T(K).
        acceptance: of all rows, by position.
        balance: plain steps that drafts have won; < 0: lost.
        reading: plain steps that the drafter takes in a step with drafts, on average, to read prompts and what was
            emitted without drafts.
    """

    def __init__(self, widths: Sequence[int], costs: Sequence[float] | None = None):
        self.times, self.acceptance = StepTimes(widths, costs), Acceptance(max(widths))
        self.balance = 0.0
        self._read, self._steps = 0.0, 0.0

    @property
    def reading(self) -> float:
        return self._read / max(self._steps, FEWEST_STEPS)

    def count_step(self) -> None:
        """Counts a step with drafts."""
        self._read, self._steps = READING_MEMORY * self._read, READING_MEMORY * self._steps + 1

    def add_reading(self, plain_steps: float) -> None:
        self._read += plain_steps


def learned(drafts: AdaptiveDrafts, few: bool) -> Learned:
    """Returns what is known of steps before the first one.

    Args:
        few: only 0, 1, 2, 4, ... and the K that are given are chosen, as each K takes a CUDA graph.
    """
    most, costs = drafts.max_drafts, drafts.costs
    powers = [0, *(1 << i for i in range(most.bit_length())), drafts.sampled or 0, most]
    widths = sorted({*powers}) if few else range(most + 1)
    return Learned(widths, None if costs is None else [costs[k] for k in widths])


class SharedLength:
    """One K for all rows that draft, the best one for the batch as a whole: with which it emits the most tokens per
    time or, if the end is near, with which the last sequence ends first.

    Drafts that do not pay are tried again from time to time, since texts change. An account in units of plain steps
    limits what that may cost: every plain step pays a hundredth into it, and steps with drafts pay in what they have
    won, or take out what they have lost. A trial begins when the account is not overdrawn, so on average trials cost
    one percent, whatever the times of steps. It begins with one draft, and goes on while drafts are expected to pay.
    """

    def __init__(self, learned: Learned, size: int):
        self.learned, self.widths = learned, learned.times.widths
        self.rows = RowAcceptance(learned.acceptance, max(self.widths), size)
        self._state = _State.DRAFTING
        self._rest = 0  # plain steps until drafts may be tried
        self._k, self._held = 0, HOLD  # K of the step before, and since how many steps it was not chosen anew
        self._most = 1  # the last K > 0; K may double from step to step, since first estimates are bold
        self._chosen, self._looks = 0, 0  # how often K was chosen; how often it was another K than the best
        self._results: list[RowResult] = []  # with drafts, and not recorded in ``rows`` yet
        self._steps = 0  # that these are from

    def begin(self, row: int) -> None:
        self._enter()
        self.rows.begin(row)

    def next(self, drafting: Sequence[int], live: int, remaining: Remaining | None = None) -> Mapping[int, int]:
        return dict.fromkeys(drafting, self._choose(drafting, live, remaining) if drafting else 0)

    def _choose(self, drafting: Sequence[int], live: int, remaining: Remaining | None) -> int:
        if (missing := self.learned.times.missing) is not None:
            return missing
        if self._state == _State.PAUSED:
            self._rest -= 1
            if self._rest % HOLD > 0 or self.learned.balance < 0:
                return 0
        if self._state == _State.DRAFTING and self._held < HOLD:
            self._held += 1
            return self._k
        before = self._k
        self._k = self._chosen_anew(drafting, live, remaining)
        self._most = self._k or self._most
        self._held = 1 if self._k == before else HOLD
        return self._k

    def _chosen_anew(self, drafting: Sequence[int], live: int, remaining: Remaining | None) -> int:
        self._enter()
        best = self._best(drafting, live, remaining)
        if best > 0:
            if self._state == _State.PAUSED or self.learned.balance >= 0:
                self._state = _State.DRAFTING
            while self.widths[best] > 2 * self._most:
                best -= 1
            return self._look_around(best)
        if self._state != _State.PAUSED:
            self._state, self._rest = _State.PAUSED, REST
            return 0
        if self._rest > 0:
            return 0
        self._state, self._most = _State.TRIAL, self.widths[1]
        self.rows.forget()
        return self.widths[1]

    def _best(self, drafting: Sequence[int], live: int, remaining: Remaining | None) -> int:
        """Returns the place in ``widths`` of the fastest K."""
        reached, count = self.rows.reached(drafting), np.arange(1, max(self.widths) + 1)
        accepted = np.pad(reached.cumsum(1), ((0, 0), (1, 0)))[:, self.widths]
        times = np.array(self.learned.times.relative)
        times[1:] += self.learned.reading
        times[0] /= 1 + (RETURN if self._state == _State.PAUSED else MARGIN)
        if remaining is None:
            return int(((live + accepted.sum(0)) / times).argmax())
        squares = np.pad(((2 * count - 1) * reached).cumsum(1), ((0, 0), (1, 0)))[:, self.widths]
        return int((_steps_left(drafting, 1 + accepted, squares - accepted**2, remaining) * times).argmin())

    def _enter(self) -> None:
        """Records the results that were collected."""
        if self._results:
            self.rows.record(self._steps, self._results)
        self._results, self._steps = [], 0

    def _look_around(self, best: int) -> int:
        """Returns the K at the place ``best``, or now and then its smaller or larger neighbour, or 0."""
        self._chosen += 1
        if self._chosen % LOOK_AROUND == 0 and not self.learned.times.fixed:
            self._looks += 1
            best = (min(best + 1, len(self.widths) - 1), best - 1, 0)[self._looks % 3]
        return self.widths[best]

    def took(self, num_drafts: int, seconds: float) -> None:
        self.learned.times.took(num_drafts, seconds)

    def caught_up(self, seconds: float) -> None:
        plain = self.learned.times.seconds_plain
        if plain is None:
            return
        self.learned.add_reading(seconds / plain)
        if self._state == _State.TRIAL:
            self.learned.balance -= seconds / plain

    def record(self, num_drafts: int, results: Sequence[RowResult]) -> None:
        learned = self.learned
        if num_drafts > 0:
            self._results += [r for r in results if r.asked > 0 and not r.ended]
            self._steps += 1
        if learned.times.missing is not None or not results:
            return
        won = SHARE
        if num_drafts > 0:
            learned.count_step()
            won = sum(r.emitted for r in results) / len(results) - learned.times.of(num_drafts)
            if self._state == _State.DRAFTING:  # a trial has paid for what was read
                won -= learned.reading
        learned.balance = min(learned.balance + won, CREDIT)


def _steps_left(drafting: Sequence[int], mean: np.ndarray, variance: np.ndarray, remaining: Remaining) -> np.ndarray:
    """Returns after how many steps the last sequence is expected to end, for each K.

    A row that may emit r tokens takes about r / m steps with a variance of r v / m^3, where m and v are the mean and
    the variance of what a step emits (a renewal process). The last of n rows comes later by z standard deviations, the
    expected largest of n normal numbers (Blom 1958). Without drafts all rows are in step, so speculation has to win
    more than that. A waiting sequence is expected to be like that of some row, and begins in the row that ends first.

    Args:
        mean, variance: [n, K] of the rows of ``drafting``.
    """
    rooms, size = remaining.rooms, len(remaining.rooms)
    room = np.array([rooms[row] for row in drafting])[:, None]
    steps, spread = room / mean, room * variance / mean**3
    if plain := [[left] * mean.shape[1] for row, left in rooms.items() if row not in {*drafting}]:
        steps, spread = np.concatenate((steps, plain)), np.pad(spread, ((0, len(plain)), (0, 0)))
    if remaining.waiting:
        like = np.arange(len(remaining.waiting)) % len(drafting)
        room, mean, variance = np.array(remaining.waiting)[:, None], mean[like], variance[like]
        first, columns = steps.argsort(0)[: len(like)], np.arange(steps.shape[1])
        steps[first, columns] += (room / mean)[: len(first)]
        spread[first, columns] += (room * variance / mean**3)[: len(first)]
    z = _NORMAL.inv_cdf((size - 0.375) / (size + 0.25))
    return (steps + z * np.sqrt(spread)).max(0)


class OwnLengths:
    """Each sequence has its own K, which depends on its own drafts and on given costs alone."""

    def __init__(self, new: Callable[[], Learned], size: int):
        self._new = new
        self._of_rows = [SharedLength(new(), 1) for _ in range(size)]

    def begin(self, row: int) -> None:
        self._of_rows[row] = SharedLength(self._new(), 1)

    def next(self, drafting: Sequence[int], live: int, remaining: Remaining | None = None) -> Mapping[int, int]:
        return {row: self._of_rows[row].next([0], 1)[0] for row in drafting}

    def took(self, num_drafts: int, seconds: float) -> None:
        pass

    def caught_up(self, seconds: float) -> None:
        pass

    def record(self, num_drafts: int, results: Sequence[RowResult]) -> None:
        for result in results:
            self._of_rows[result.row].record(result.asked, [result._replace(row=0)])
