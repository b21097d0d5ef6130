"""Chooses the K of each step of a batch by learned acceptance and learned step times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

from .acceptance import Acceptance, RowAcceptance
from .draft_length import NO_CAPS, AdaptiveDrafts, DraftLengths, FixedLengths, Remaining, RowResult
from .step_times import StepTimes

SHARE = 0.01  # of the time of plain steps that trials of drafts may lose
CREDIT = 8.0  # plain steps that trials may lose at once, after drafts that have won them
REST = 32  # plain steps after drafts that did not pay, at least, before they are tried again
BEGUN_MEMORY = 0.99  # weight of older steps in how often sequences begin, and
FEWEST_TOKENS = 50  # a row, that sequences are taken to have at least: many begin at once when a batch begins
READINGS = 5  # of prompts, whose median counts
MARGIN = 0.03  # by which drafts must be expected to win: what seems best is often so by chance; and
RETURN = 0.06  # after a pause, without a trial, since the drafter has to read what it missed
HOLD = 6  # steps for which a K is kept that was chosen twice, since choosing takes time
WAIT = 16  # the same for plain steps in a pause
TRIAL = 3  # steps; the first one is not timed, since what it needs is in no cache
LOOK_AROUND = 5  # choices, after which one step has another K, so that its time stays known


class Learned:
    """What a decoder has learned about steps with so many rows. Batches share it, one after another or at once.

    Attributes:
        times: T(K).
        acceptance: of all rows, by position.
        balance: plain steps that drafts have won; < 0: lost.
        measures: whether what this process measures counts. Otherwise K is a function of texts and ``costs``.
    """

    def __init__(self, widths: Sequence[int], costs: Sequence[float] | None = None, measures: bool = True):
        self.times, self.acceptance, self.measures = StepTimes(widths, costs), Acceptance(max(widths)), measures
        self.balance = 0.0
        self._prompts: deque[float] = deque(maxlen=READINGS)  # seconds that the drafter took to read one
        self._begun, self._tokens = 0.0, 0.0  # of a row: sequences, and tokens that were emitted

    def reading(self) -> float:
        """Returns the seconds that the drafter takes to read prompts, for each token that is emitted."""
        if not self._prompts:
            return 0.0
        return median(self._prompts) * self._begun / max(self._tokens, FEWEST_TOKENS)

    def read_prompt(self, seconds: float) -> None:
        self._prompts.append(seconds)

    def began(self, rows: float) -> None:
        """Counts sequences, as a fraction of the rows."""
        self._begun += rows

    def emitted(self, tokens: float) -> None:
        """Counts what a step emitted, as an average of the rows."""
        self._begun, self._tokens = BEGUN_MEMORY * self._begun, BEGUN_MEMORY * self._tokens + tokens


def learned(drafts: AdaptiveDrafts, few: bool) -> Learned:
    """Returns what is known of steps before the first one.

    Args:
        few: only 0, 1, 2, 4, ... and the K that are given are chosen, as each K takes a CUDA graph.
    """
    return _learned(drafts, few, drafts.costs)


def _learned(drafts: AdaptiveDrafts, few: bool, costs: Sequence[float] | None) -> Learned:
    most, fixed = drafts.max_drafts, drafts.sampled if isinstance(drafts.sampled, int) else 0
    powers = [0, *(1 << i for i in range(most.bit_length())), fixed, most]
    widths = sorted({*powers}) if few else range(most + 1)
    return Learned(widths, None if costs is None else [costs[k] for k in widths], measures=costs is None)


def sampled_lengths(drafts: AdaptiveDrafts, few: bool, size: int) -> DraftLengths | None:
    """Returns what chooses the K of steps in which the text of one of ``size`` rows depends on K; None: what chooses it
    in other steps."""
    own = drafts.sampled
    if own is None or isinstance(own, int):
        return None if own is None else FixedLengths(own)
    return OwnLengths(lambda: _learned(drafts, few, own), size)


class SharedLength:
    """One K for all rows that draft, the best one for the batch as a whole: with which it emits the most tokens per
    time or, if the end is near, with which the last sequence ends first.

    Drafts that do not pay are tried again from time to time, since texts change. An account in units of plain steps
    limits what that may cost: every plain step pays a hundredth into it, and steps with drafts pay in what they have
    won, or take out what they have lost. A trial begins when the account is not overdrawn, so on average trials cost
    one percent, whatever the times of steps. It begins with three steps of one draft, and goes on while drafts are
    expected to pay.

    Steps may have fewer rows than the batch. Times and account are those of the number that they have; what is learned
    of texts holds for all.

    Args:
        learned: of steps with all rows.
        size: rows of the batch.
        of_rows: what is known of steps with fewer.
    """

    def __init__(self, learned: Learned, size: int, of_rows: Callable[[int], Learned] | None = None):
        self.learned, self.widths = learned, learned.times.widths
        self._texts, self._of_rows = learned, of_rows
        self.rows = RowAcceptance(learned.acceptance, max(self.widths), size)
        self._paused = False  # plain decoding, until drafts are tried again
        self._rest = 0  # plain steps until drafts may be tried
        self._k, self._keep = 0, 0  # K of the step before, and for how many steps it is not chosen anew
        self._top = max(self.widths)  # the most that any row may draft
        self._most = 1  # the last K > 0; K may double from step to step, since first estimates are bold
        self._chosen, self._looks = 0, 0  # how often K was chosen; how often it was another K than the best
        self._cold = False  # the next step with drafts is the first one after a pause
        self._size, self._new = size, 0  # rows; sequences that the drafter was not shown
        self._results: list[RowResult] = []  # with drafts, and not recorded in ``rows`` yet
        self._steps = 0  # that these are from

    def begin(self, row: int) -> None:
        self._enter()
        self.rows.begin(row)
        self._new += 1
        self._texts.began(1 / self._size)

    def use(self, rows: int) -> None:
        assert self._of_rows is not None
        self.learned, self._keep = self._of_rows(rows), 0

    def next(
        self,
        drafting: Sequence[int],
        live: int,
        remaining: Remaining | None = None,
        caps: Mapping[int, int] = NO_CAPS,
    ) -> Mapping[int, int]:
        return dict.fromkeys(drafting, self._choose(drafting, live, remaining, caps) if drafting else 0)

    def _choose(self, drafting: Sequence[int], live: int, remaining: Remaining | None, caps: Mapping[int, int]) -> int:
        self._top = max(caps.get(row, self.widths[-1]) for row in drafting)
        if (missing := self.learned.times.missing_to(self._top)) is not None:
            return missing
        self._rest -= self._paused
        if self._keep > 0:
            self._keep -= 1
            return self._k
        if self._paused and self.learned.balance < 0:
            return 0
        before = self._k
        self._k = self._chosen_anew(drafting, live, remaining, caps)
        self._most = self._k or self._most
        if self._k == before:
            self._keep = (WAIT if self._paused else HOLD) - 1
        return self._k

    def _chosen_anew(
        self, drafting: Sequence[int], live: int, remaining: Remaining | None, caps: Mapping[int, int]
    ) -> int:
        self._enter()
        best = self._best(drafting, live, remaining, caps)
        if best > 0:
            self._cold |= self._paused
            self._paused = False
            while self.widths[best] > 2 * self._most:
                best -= 1
            return self._look_around(best)
        if not self._paused:
            self._paused, self._rest = True, REST
            return 0
        if self._rest > 0:
            return 0
        self._paused, self._cold, self._keep, self._most = False, True, TRIAL - 1, self.widths[1]
        self.rows.forget()
        return self.widths[1]

    def _best(self, drafting: Sequence[int], live: int, remaining: Remaining | None, caps: Mapping[int, int]) -> int:
        """Returns the place in ``widths`` of the fastest K."""
        reached = self.rows.reached(drafting)
        for i, row in enumerate(drafting):
            reached[i, caps.get(row, self.widths[-1]) :] = 0
        accepted = np.pad(reached.cumsum(1), ((0, 0), (1, 0)))[:, self.widths]
        emitted, times = live + accepted.sum(0), np.array(self.learned.times.relative)
        if (plain := self.learned.times.seconds_plain) is not None:
            times[1:] += self._texts.reading() / plain * emitted[1:]
        times[0] /= 1 + (RETURN if self._paused else MARGIN)
        if remaining is None:
            return int((emitted / times).argmax())
        return int((_steps_left(drafting, 1 + accepted, remaining) * times).argmin())

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
        if num_drafts > 0 and self._cold:
            self._cold = False
        elif self.learned.measures:
            self.learned.times.took(num_drafts, seconds)

    def caught_up(self, seconds: float) -> None:
        plain = self.learned.times.seconds_plain
        if plain is None or not self.learned.measures:
            return
        self.learned.balance -= seconds / plain
        if self._new > 0 and not self._cold:  # or else it was shown what it had missed, too
            self._texts.read_prompt(seconds / self._new)
        self._new = 0

    def record(self, num_drafts: int, results: Sequence[RowResult]) -> None:
        learned = self.learned
        if num_drafts > 0:
            self._results += [r for r in results if r.asked > 0 and not r.ended]
            self._steps += 1
        if learned.times.missing_to(self._top) is not None or not results:
            return
        emitted = sum(r.emitted for r in results)
        self._texts.emitted(emitted / self._size)
        won = emitted / len(results) - learned.times.of(num_drafts) if num_drafts > 0 else SHARE
        learned.balance = min(learned.balance + won, CREDIT)


def _steps_left(drafting: Sequence[int], emitted: np.ndarray, remaining: Remaining) -> np.ndarray:
    """Returns after how many steps the last sequence is expected to end, for each K.

    A waiting sequence is expected to be like that of some row, and begins in the row that ends first. A row of whose
    drafts fewer are accepted ends late: without drafts all rows are in step, so speculation has to win more than that.

    Args:
        emitted: [n, K] tokens a step of the rows of ``drafting``.
    """
    rooms = remaining.rooms
    steps = np.array([rooms[row] for row in drafting])[:, None] / emitted
    if plain := [[left] * emitted.shape[1] for row, left in rooms.items() if row not in {*drafting}]:
        steps = np.concatenate((steps, plain))
    if remaining.waiting:
        like = np.arange(len(remaining.waiting)) % len(drafting)
        first, columns = steps.argsort(0)[: len(like)], np.arange(steps.shape[1])
        steps[first, columns] += (np.array(remaining.waiting)[:, None] / emitted[like])[: len(first)]
    return steps.max(0)


class OwnLengths:
    """Each sequence has its own K, which depends on its own drafts and on given costs alone."""

    def __init__(self, new: Callable[[], Learned], size: int):
        self._new = new
        self._of_rows = [SharedLength(new(), 1) for _ in range(size)]

    def begin(self, row: int) -> None:
        self._of_rows[row] = SharedLength(self._new(), 1)

    def next(
        self,
        drafting: Sequence[int],
        live: int,
        remaining: Remaining | None = None,
        caps: Mapping[int, int] = NO_CAPS,
    ) -> Mapping[int, int]:
        own = {row: {0: caps[row]} if row in caps else NO_CAPS for row in drafting}
        return {row: self._of_rows[row].next([0], 1, caps=own[row])[0] for row in drafting}

    def use(self, rows: int) -> None:
        pass

    def took(self, num_drafts: int, seconds: float) -> None:
        pass

    def caught_up(self, seconds: float) -> None:
        pass

    def record(self, num_drafts: int, results: Sequence[RowResult]) -> None:
        for result in results:
            self._of_rows[result.row].record(result.asked, [result._replace(row=0)])
