"""How many tokens the rows of a batch draft in a step: a fixed number K, or the one that emits the most a second.

K adapts by a table and an estimate: T(n, K), the time of a step with n rows, learned from steps, and the acceptance of
drafts by their position. A step with K drafts is expected to emit n + (accepted drafts of all rows) tokens, and the K
with the most tokens a second is chosen, which is 0 where no draft pays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..checks import read_count, refuse

CHOICE = 8  # steps for which a K is kept
TIMED = 4  # steps of a width before its time is known; the first one warms caches and does not count
FORGET = 1.002  # by which a known time grows with each step, so that a minimum of faster days is forgotten
DECAY = 0.98  # weight of older steps in the acceptance
GUESS, GUESS_WEIGHT = 0.8, 2.0  # acceptance before anything was tested: optimistic, since only drafting shows it
MARGIN = 1.02  # by which drafts must be expected to win
FIRST_PAUSE, LONGEST_PAUSE = 32, 1024  # plain steps before drafts that did not pay are tried again; it doubles
TRIAL = 4  # steps of one draft in a trial


@dataclass(frozen=True)
class AdaptiveDrafts:
    """Chooses K for each step, such that the whole batch emits the most tokens a second. K is 0 where no draft pays.

    All rows of a step have the same K, because a step takes the time of its widest row. Greedy texts, and those of rule
    ``coupled``, do not depend on K. A sampled text of ``token`` or ``block`` has the target's distribution whatever K
    is, but it is another one for the same seed if K differs. So while there are such texts, K is fixed.

    Args:
        max_drafts: the largest K, >= 1.
        costs: T(0), ..., T(max_drafts), the times of steps in any unit, finite, > 0, not decreasing. They are then
            taken as they are, for every number of rows, and nothing is measured: K is a function of the texts and of
            these numbers. None: they are learned. ``GenerationResult.step_costs`` returns learned ones.
        sampled: K of the steps in which a row's text depends on K, >= 0, and at most ``max_drafts``.

    Raises:
        ValueError: names the argument.
    """

    max_drafts: int = 8
    costs: Sequence[float] | None = None
    sampled: int = 4

    def __post_init__(self) -> None:
        read_count("max_drafts", self.max_drafts, 1)
        read_count("sampled", self.sampled)
        if self.costs is None:
            return
        costs = [float(c) for c in self.costs]
        fine = all(math.isfinite(c) and c > 0 for c in costs) and costs == sorted(costs)
        if len(costs) != self.max_drafts + 1 or not fine:
            refuse("costs", self.costs, f"{self.max_drafts + 1} numbers > 0 that do not fall: T(0) to T(max_drafts)")


DEFAULT_DRAFTS = AdaptiveDrafts()


def most_drafts(num_drafts: int | AdaptiveDrafts) -> int:
    """Returns the largest K."""
    return num_drafts.max_drafts if isinstance(num_drafts, AdaptiveDrafts) else num_drafts


class RowResult(NamedTuple):
    """What a step did for a row with a sequence."""

    row: int
    asked: int  # how many drafts the row was to have; a drafter may have found fewer
    accepted: int
    emitted: int
    ended: bool  # the sequence ended in this step, so its drafts after that say nothing


class FixedK:
    """The same K in every step.

    Attributes:
        most: the largest K.
        fixed: K of steps in which a row's text depends on it.
        adapts: whether the times of steps are wanted, and steps may have fewer rows.
    """

    adapts = False

    def __init__(self, num_drafts: int):
        self.most = self.fixed = num_drafts

    def chooses(self, text_depends: bool) -> bool:
        """Whether ``choose`` is asked for K, in a step in which a row's text depends on K or not; else it is
        ``fixed``."""
        return False

    def choose(self, rows: int, caps: Sequence[int]) -> int:
        return self.fixed

    def took(self, rows: int, num_drafts: int, seconds: float) -> None:
        pass

    def caught_up(self, rows: int, seconds: float) -> None:
        pass

    def record(self, num_drafts: int, results: Sequence[RowResult]) -> None:
        pass

    def costs(self, rows: int) -> list[float] | None:
        return None


class AdaptiveK(FixedK):
    """Chooses K. One object serves all batches of a decoder.

    Args:
        few: only 0, 1, 2, 4, ... are chosen, as each K takes a CUDA graph.
    """

    adapts = True

    def __init__(self, drafts: AdaptiveDrafts, few: bool):
        super().__init__(min(drafts.sampled, drafts.max_drafts))
        self.most = drafts.max_drafts
        powers = {1 << i for i in range(self.most.bit_length())}
        self.widths = sorted({0, self.fixed, self.most, *powers} if few else range(self.most + 1))
        self._given = drafts.costs
        self._times: dict[int, StepTimes] = {}
        self._tested, self._accepted = [0.0] * self.most, [0.0] * self.most
        self._k = self._keep = 0
        self._pause, self._next_pause = 0, FIRST_PAUSE

    def chooses(self, text_depends: bool) -> bool:
        return not text_depends

    def _of(self, rows: int) -> StepTimes:
        if rows not in self._times:
            self._times[rows] = StepTimes(self.widths, self._given)
        return self._times[rows]

    def choose(self, rows: int, caps: Sequence[int]) -> int:
        """Returns K of the next step.

        Args:
            rows: that the step has.
            caps: the most that each row that drafts may draft.
        """
        times = self._of(rows)
        if (missing := times.missing(max(caps))) is not None:
            return missing
        self._pause -= self._k == 0
        if self._keep > 0:
            self._keep -= 1
            return self._k
        best = self._best(times, rows, caps)
        self._keep = CHOICE - 1
        if best == 0 and self._k > 0:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
        elif best == 0 and self._pause <= 0:
            best, self._keep = self.widths[1], TRIAL - 1
            self._forget()
        elif best > 1:
            self._next_pause = FIRST_PAUSE
        self._k = best
        return best

    def _forget(self) -> None:
        """Keeps what was learned as a faint memory, so that a new trial counts."""
        faint = 1 / max(self._tested[0], 1.0)
        self._tested = [faint * n for n in self._tested]
        self._accepted = [faint * n for n in self._accepted]

    def _best(self, times: StepTimes, rows: int, caps: Sequence[int]) -> int:
        reached, chance, best, most = 0.0, 1.0, 0, max(caps)
        rate = MARGIN * rows / times.of(0)
        acceptance = self.acceptance()
        for k in range(1, most + 1):
            chance *= acceptance[k - 1]
            reached += chance * sum(cap >= k for cap in caps)
            if k in times.widths and (found := (rows + reached) / times.of(k)) > rate:
                best, rate = k, found
        return best

    def acceptance(self) -> list[float]:
        """Returns the probability that a draft is accepted if those before it in its step were, by position. A position
        that was never tested is expected to be like the one before."""
        guess, found = GUESS, []
        for tested, accepted in zip(self._tested, self._accepted, strict=True):
            guess = (accepted + GUESS_WEIGHT * guess) / (tested + GUESS_WEIGHT)
            found.append(guess)
        return found

    def took(self, rows: int, num_drafts: int, seconds: float) -> None:
        """Records the time of a step."""
        self._of(rows).took(num_drafts, seconds)

    def caught_up(self, rows: int, seconds: float) -> None:
        """Records the time in which the drafter read what it had missed in steps without drafts."""

    def record(self, num_drafts: int, results: Sequence[RowResult]) -> None:
        """Records what the rows of a step did."""
        if num_drafts == 0:
            return
        self._tested = [DECAY * n for n in self._tested]
        self._accepted = [DECAY * n for n in self._accepted]
        for r in results:
            if r.asked > 0 and not r.ended:
                # A draft that the drafter did not find counts as rejected: asking for it was in vain.
                for i in range(min(r.accepted + 1, r.asked)):
                    self._tested[i] += 1
                for i in range(r.accepted):
                    self._accepted[i] += 1

    def costs(self, rows: int) -> list[float] | None:
        """Returns T(0), T(1), ... in units of T(0), rounded to hundredths; None if they are not known yet."""
        if self._given is not None:
            return list(self._given)
        times = self._times.get(rows)
        if times is None or times.missing(self.most) is not None:
            return None
        return [round(times.of(k) / times.of(0), 2) for k in range(self.most + 1)]


class StepTimes:
    """T(K) of steps with one number of rows. Three widths are timed first: no drafts, one, and many. T is a straight
    line between timed widths, since each draft adds a draft forward and a token to verify.

    Args:
        widths: the K that may be chosen, ascending from 0.
        costs: T of every K, which then never changes; None: learned.
    """

    def __init__(self, widths: Sequence[int], costs: Sequence[float] | None):
        self.widths, self._fixed = widths, costs is not None
        last = len(widths) - 1
        self._first = sorted({widths[0], widths[min(1, last)], widths[-(-3 * last // 4)]})
        self._seconds = {k: float(costs[k]) for k in widths} if costs is not None else {}
        self._visits = dict.fromkeys(widths, 0)

    def missing(self, most: int) -> int | None:
        """Returns a width up to ``most`` that has to be timed before T is known; None: T is known. Widths take turns,
        so that a change of the machine's load affects all of them."""
        if self._fixed:
            return None
        fewest = min((k for k in self._first if k <= most), key=self._visits.__getitem__)
        return fewest if self._visits[fewest] <= TIMED else None

    def took(self, width: int, seconds: float) -> None:
        if self._fixed or width not in self._visits:
            return
        self._visits[width] += 1
        if self._visits[width] == 1:
            return
        self._seconds = {k: FORGET * t for k, t in self._seconds.items()}
        self._seconds[width] = min(seconds, self._seconds.get(width, seconds))

    def of(self, width: int) -> float:
        """Returns T(width), not less than that of a smaller width."""
        points = sorted(self._seconds.items())
        if len(points) == 1:
            return points[0][1]
        i = next((i for i in range(1, len(points)) if points[i][0] >= width), len(points) - 1)
        (k0, t0), (k1, t1) = points[i - 1], points[i]
        return t0 + max(t1 - t0, 0.0) * (width - k0) / (k1 - k0)
