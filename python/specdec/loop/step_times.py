"""T(n, K), the time of a step of n rows that verifies K drafts in the row with the most, learned from the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from operator import mul

DECAY = 0.98  # weight of older steps in how many drafts are found
GUESS_WEIGHT = 2.0  # tests that a first guess of a probability is worth
SEEN = 2  # steps of a width, after a first one, by which drafts may be given up
TIMED = 5  # steps of a width before its time is known, after a first one that warms caches; the shortest counts
SPEED_RATE = 0.25  # how fast the machine's speed is followed
WIDTH_RATE = 0.03  # how fast the times of widths are followed, relative to each other
SURPRISE = 0.4  # the largest error that counts, as a logarithm: a longer step was interrupted by something


class StepTimes:
    """T(K) of steps with one number of rows, and how many drafts are found in them. T is a straight line between timed
    widths, since each draft adds a draft forward and a token to verify.

    All steps are timed. A change of the machine's speed shows in whatever width is in use, so the speed is a factor of
    its own, and the times of widths among each other change slowly.

    Args:
        widths: the K that may be chosen, ascending from 0.
        costs: T of every K, which then never changes; None: learned.
        guess: gives T(K) in any unit, and counts as far as nothing is timed. None: three widths are asked for first: no
            drafts, one, and many.
    """

    def __init__(
        self, widths: Sequence[int], costs: Sequence[float] | None, guess: Callable[[int], float] | None = None
    ):
        self.widths, self._fixed, self._guess = widths, costs is not None, guess
        last = len(widths) - 1
        asked = {widths[0], widths[min(1, last)], widths[-(-3 * last // 4)]}
        self._first = sorted(asked if guess is None else widths)
        self._times = {k: math.log(costs[k]) for k in widths} if costs is not None else {}  # logarithms, at speed 0
        self._speed = 0.0  # logarithm of a factor of all times
        self._line: list[tuple[int, float]] | None = None  # the timed widths and their seconds; None: to be worked out
        self._turns = dict.fromkeys(widths, 0)  # steps that were asked for a width
        self._visits = dict.fromkeys(range(widths[-1] + 1), 0)  # those that had it
        self._asked, self._found = [0.0] * widths[-1], [0.0] * widths[-1]  # steps, by the drafts' position

    def missing(self, most: int, steps: int = TIMED) -> int | None:
        """Returns a width up to ``most`` that has to be asked for before T is known by so many steps of each; None: it
        is. Widths take turns, so that a change of the machine's load affects all of them. With a guess, T(0) is enough,
        by which it is scaled."""
        if self._fixed:
            return None
        if self._guess is not None:
            return 0 if self._turns[0] <= SEEN else None
        fewest = min((k for k in self._first if k <= most), key=self._turns.__getitem__)
        return fewest if self._turns[fewest] <= steps else None

    def found(self, asked: int, width: int) -> None:
        """Records that ``width`` of ``asked`` drafts were found in the row with the most."""
        for i in range(self.widths[-1]):
            self._asked[i] = DECAY * self._asked[i] + (i < asked and i <= width)
            self._found[i] = DECAY * self._found[i] + (i < width)

    def expected(self) -> list[float]:
        """Returns the seconds that a step is expected to take which is asked for 0, 1, ... drafts."""
        times = [self.of(k) for k in range(self.widths[-1] + 1)]
        chances = accumulate(by_position(self._asked, self._found, 1.0), mul)
        more = (chance * (after - before) for chance, (before, after) in zip(chances, pairwise(times), strict=True))
        return [*accumulate(more, initial=times[0])]

    def took(self, asked: int, width: int, seconds: float) -> None:
        """Records the time of a step. It is that of the width that was found, however many drafts were asked for."""
        if self._fixed or seconds <= 0 or width not in self._visits:
            return
        if asked in self._turns:
            self._turns[asked] += 1
        self._visits[width] += 1
        count, time, line = self._visits[width] - 1, math.log(seconds) - self._speed, len(self._times) > 1
        if count == 0 and line:  # it warms caches
            return
        if not line or (width in self._first and count <= TIMED):
            self._times[width] = min(time, self._times.get(width, time))
        else:
            known = self._times.get(width)
            if known is None:
                known = math.log(self.of(width)) - self._speed
            error = min(max(time - known, -SURPRISE), SURPRISE)
            self._times[width] = known + max(1 / (count + 1), WIDTH_RATE) * error
            self._speed += SPEED_RATE * error
        self._line = None

    @property
    def is_known(self) -> bool:
        """Whether steps with drafts are timed, and steps without."""
        known = [k for k, _ in self._known()]
        return len(known) > 1 and known[0] == 0

    def _known(self) -> list[tuple[int, float]]:
        """Returns the timed widths, ascending, and their seconds. With a guess, a time counts when another step
        confirmed it."""
        if self._line is None:
            least, times = 0 if self._fixed or self._guess is None else SEEN + 1, sorted(self._times.items())
            self._line = [(k, math.exp(t + self._speed)) for k, t in times if self._visits[k] >= least]
        return self._line

    def of(self, width: int) -> float:
        """Returns T(width) in seconds, by the line through the timed widths around it, and beyond them by the guess."""
        known = self._known()
        if self._guess is not None and not (known and known[0][0] <= width <= known[-1][0]):
            return self._guessed(width, known)
        i = next((i for i in range(1, len(known)) if known[i][0] >= width), len(known) - 1)
        (k0, t0), (k1, t1) = known[max(i - 1, 0)], known[i]
        return t0 + max(t1 - t0, 0.0) * (width - k0) / max(k1 - k0, 1)

    def _guessed(self, width: int, known: Sequence[tuple[int, float]]) -> float:
        assert self._guess is not None
        if not known:
            return self._guess(width)
        (first, t0), (last, t1) = known[0], known[-1]
        if width < first:
            return t0 * self._guess(width) / self._guess(first)
        line = t1 + (t1 - t0) * (width - last) / max(last - first, 1)
        return max(line, t1 * self._guess(width) / self._guess(last))


def by_position(tested: Sequence[float], passed: Sequence[float], guess: float) -> list[float]:
    """Returns the probability that a draft passes if those before it did, by position. A position that was never tested
    is expected to be like the one before."""
    found = []
    for n, of_these in zip(tested, passed, strict=True):
        guess = (of_these + GUESS_WEIGHT * guess) / (n + GUESS_WEIGHT)
        found.append(guess)
    return found
