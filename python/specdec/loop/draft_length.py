"""How many tokens the rows of a batch draft in a step: a fixed number K, or the one that emits the most a second.

K adapts by two estimates: T(n, K), the time of a step with n rows, and the acceptance of drafts by their position. A
step that is asked for K drafts is expected to emit a token of each row and the accepted drafts. It takes the time of
those that are found: a drafter may find fewer, and then fewer are verified. The K with the most tokens a second is
chosen. It is 0 where no draft pays; drafts are then tried again now and then, which may lose ``SHARE`` of the time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ..checks import read_count, refuse
from ..drafters.composite import by_match
from ..drafters.protocol import Copies, Share, Votes
from .step_times import DECAY, SEEN, StepTimes, by_position

CHOICE = 6  # steps for which a K is kept, since choosing takes time
LOOK_AROUND = 32  # choices, after which one step has another K, so that its time stays known
MARGIN = 1.03  # by which drafts must be expected to win: what seems best is often so by chance
GUESS = 0.8  # acceptance before anything was tested: optimistic, since only drafting shows it
SHARE = 0.01  # of the time, which drafts that do not pay may lose
PAUSE = 32, 2048  # plain steps after such drafts, at least and at most
TRIAL = 4  # steps with one draft, after a pause


@dataclass(frozen=True)
class AdaptiveDrafts:
    """Chooses K for each step, such that the whole batch emits the most tokens a second. K is 0 where no draft pays.

    All rows of a step have the same K, because a step takes the time of its widest row. Greedy texts, and those of rule
    ``coupled``, do not depend on K. A sampled text of ``token`` or ``block`` has the target's distribution whatever K
    is, but it is another one for the same seed if K differs. So while there are such texts, K is fixed.

    Of a drafter that copies, the most are looked up, and how many are verified is chosen then. Where nothing that is
    found is worth that, steps in which nothing is looked up come between, so that looking takes 1 % of the time.

    Args:
        max_drafts: the largest K, >= 1.
        costs: T(0), ..., T(max_drafts), the times of steps in any unit, finite, > 0, not decreasing. They are then
            taken as they are, for every number of rows, and nothing is measured: K is a function of the texts and of
            these numbers. None: they are learned. ``GenerationResult.step_costs`` returns learned ones.
        fixed: K of the steps in which a row's text depends on K, >= 0, and at most ``max_drafts``.

    Raises:
        ValueError: names the argument.

    Example:
        >>> from specdec import AdaptiveDrafts, SpeculativeDecoder, load_embedded_pair
        >>> target, draft, tokenizer = load_embedded_pair()
        >>> decoder = SpeculativeDecoder(target, draft, num_drafts=AdaptiveDrafts(max_drafts=4))
        >>> result = decoder.generate([tokenizer("import os").input_ids], max_new_tokens=16)
        >>> sum(result.stats.steps_by_drafts) == result.stats.steps  # how many steps had K = 0, 1, 2, ...
        True
    """

    max_drafts: int = 8
    costs: Sequence[float] | None = None
    fixed: int = 4

    def __post_init__(self) -> None:
        read_count("max_drafts", self.max_drafts, 1)
        read_count("fixed", self.fixed)
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


class CopyResult(NamedTuple):
    """What was copied for a row, and what its text then was."""

    matched: int  # tokens before the copied ones that match, as in ``Copies``
    copied: Sequence[int]  # verified or not
    emitted: Sequence[int]
    votes: Votes = Votes.UNKNOWN


class RowResult(NamedTuple):
    """What a step did for a row with a sequence."""

    asked: int  # how many drafts the row was to have; a drafter may have found fewer
    accepted: int
    emitted: int
    ended: bool  # the sequence ended in this step, so its drafts after that say nothing
    copy: CopyResult | None = None  # None: its drafter does not copy
    one_hot: bool = False  # its drafts were copied beside those of another drafter


class StepOutcome(NamedTuple):
    """What a step took, and what it did for the rows with a sequence."""

    rows: int  # that the step had
    num_drafts: int  # that it was asked for
    width: int  # the most that were found in a row, so that no more were verified
    results: Sequence[RowResult]
    seconds: float | None = None  # None: it was not timed, or took longer than the next one like it will
    # Seconds before the step in which the drafter read prompts, or what it had missed in steps without drafts.
    catching_up: float | None = None  # None: there was nothing to read
    forwards: int = 1  # of the drafter; 0: what it drafted was copied
    looking: float = 0.0  # seconds that the host took to draft


class DraftLength(ABC):
    """Chooses K. One object serves all batches of a decoder.

    Attributes:
        most: the largest K.
        fixed: K of steps in which a row's text depends on it.
        widths: how many drafts a step may verify, ascending.
        adapts: whether the times of steps are wanted, and steps may have fewer rows.
    """

    adapts = False

    def __init__(self, most: int, fixed: int):
        self.most, self.fixed = most, fixed
        self.widths = sorted({0, fixed, most})

    @abstractmethod
    def chooses(self, text_depends: bool) -> bool:
        """Whether ``choose`` is asked for K, in a step in which a row's text depends on K or not; else it is
        ``fixed``."""

    @abstractmethod
    def choose(self, rows: int, live: int, caps: Sequence[int]) -> int:
        """Returns K of the next step.

        Args:
            rows: that the step has; ``live`` of them have a sequence.
            caps: the most that each row that drafts may draft.
        """

    def cut(self, rows: int, live: int, copies: Copies) -> int | None:
        """Returns how many drafts of the row with the most are verified; None: all of them.

        Args:
            rows: that the step has; ``live`` of them have a sequence.
            copies: what was found in each row.
        """
        return None

    def share(self, rows: int, live: int, copies: Copies, allowed: Sequence[int], behind: bool) -> Share:
        """Returns who drafts each row, and how many tokens, where one drafter copies and another one does not.

        Args:
            rows, live, copies: as in ``cut``.
            allowed: how many drafts each row may have.
            behind: whether the other drafter has missed tokens.
        """
        return by_match(copies, allowed, behind)

    def observe(self, step: StepOutcome) -> None:  # noqa: B027  # most learn nothing
        """Learns from a step. Steps come in their order."""

    def costs(self, rows: int) -> list[float] | None:
        """Returns T(0), T(1), ... in units of T(0), rounded to hundredths; None if they are not known."""
        return None


class FixedK(DraftLength):
    """The same K in every step."""

    def __init__(self, num_drafts: int):
        super().__init__(num_drafts, num_drafts)

    def chooses(self, text_depends: bool) -> bool:
        return False

    def choose(self, rows: int, live: int, caps: Sequence[int]) -> int:
        return self.fixed


class TimedK(DraftLength):
    """Chooses K by the times of steps.

    Args:
        few: only 0, 1, 2, 4, ... are chosen, as each K takes a CUDA graph, or a recording.
    """

    adapts = True

    def __init__(self, drafts: AdaptiveDrafts, few: bool):
        super().__init__(drafts.max_drafts, min(drafts.fixed, drafts.max_drafts))
        powers = {1 << i for i in range(self.most.bit_length())}
        self.widths = sorted({0, self.fixed, self.most, *powers} if few else range(self.most + 1))
        self._given = drafts.costs
        self._times: dict[int, StepTimes] = {}

    def chooses(self, text_depends: bool) -> bool:
        return not text_depends

    def times(self, rows: int) -> StepTimes:
        """Returns those of steps with so many rows."""
        if rows not in self._times:
            self._times[rows] = StepTimes(self.widths, self._given, self._guess(rows))
        return self._times[rows]

    def _guess(self, rows: int) -> Callable[[int], float] | None:
        """Returns a guess of the times of steps with so many rows: those of the nearest number of rows."""
        near = [n for n, times in self._times.items() if times.is_known]
        return self._times[min(near, key=lambda n: abs(math.log(n / rows)))].of if near else None

    def observe(self, step: StepOutcome) -> None:
        if step.seconds is not None:
            self.times(step.rows).took(step.num_drafts, step.width, step.seconds)

    def costs(self, rows: int) -> list[float] | None:
        if self._given is not None:
            return list(self._given)
        times = self._times.get(rows)
        if times is None or times.missing(self.most, SEEN) is not None or not times.is_known:
            return None
        return [round(times.of(k) / times.of(0), 2) for k in range(self.most + 1)]


class AdaptiveK(TimedK):
    """Chooses K before a step drafts, by the acceptance of drafts at each position."""

    def __init__(self, drafts: AdaptiveDrafts, few: bool):
        super().__init__(drafts, few)
        self._tested, self._accepted = [0.0] * self.most, [0.0] * self.most
        self._k, self._keep, self._choices, self._rows = self.widths[1], 0, 0, 0
        self._pause = 0  # plain steps before the next trial
        self._balance = 0.0  # plain steps that drafts have won since the last pause; < 0: lost
        self._resumed: StepTimes | None = None  # of the rows whose drafter is about to read what it missed
        self._reading = 0.0  # seconds a step in which the drafter reads prompts

    def choose(self, rows: int, live: int, caps: Sequence[int]) -> int:
        if self._k == 0 and rows == self._rows:
            self._pause -= 1
            if self._pause > 0:
                return 0
        times = self.times(rows)
        if (missing := times.missing(max(caps))) is not None:
            # Where drafts do not seem to pay, to time them more often would only lose.
            if times.missing(max(caps), SEEN) is not None or self._best(times, live, caps):
                return missing
        if rows != self._rows:  # whose steps take other times: what pays is another question
            self._rows, self._keep = rows, 0
        elif self._k == 0:
            self._resume(times)
            return self._k
        if self._keep > 0:
            self._keep -= 1
            return self._k
        self._k, self._keep = self._best(times, live, caps), CHOICE - 1
        if self._k == 0:
            least, longest = PAUSE
            self._pause = int(min(max(-self._balance / SHARE, least), longest))
            return 0
        self._choices += 1
        if self._choices % LOOK_AROUND:
            return self._k
        return self.widths[self._choices // LOOK_AROUND % len(self.widths)]

    def _resume(self, times: StepTimes) -> None:
        """Tries drafts again, and keeps what was known of their acceptance as a faint memory, so that this counts."""
        self._k, self._keep, self._balance, self._resumed = self.widths[1], TRIAL - 1, 0.0, times
        faint = 1 / max(self._tested[0], 1.0)
        self._tested = [faint * n for n in self._tested]
        self._accepted = [faint * n for n in self._accepted]

    def _best(self, times: StepTimes, live: int, caps: Sequence[int]) -> int:
        """Returns the K that is expected to emit the most tokens a second."""
        reached, chance, best = 0.0, 1.0, 0
        rate, reading = MARGIN * live / times.of(0), 0.0 if self._given else self._reading
        seconds = times.expected()
        for k, acceptance in enumerate(self.acceptance()[: max(caps)], 1):
            chance *= acceptance
            reached += chance * sum(cap >= k for cap in caps)
            if k in times.widths and (speed := (live + reached) / (seconds[k] + reading)) > rate:
                best, rate = k, speed
        return best

    def acceptance(self) -> list[float]:
        """Returns the probability that a draft is accepted if those before it in its step were, by position. A position
        that was never tested is expected to be like the one before."""
        return by_position(self._tested, self._accepted, GUESS)

    def observe(self, step: StepOutcome) -> None:
        if step.catching_up is not None:
            self._count_catching_up(step.catching_up)
        super().observe(step)
        self._reading *= DECAY
        if step.num_drafts > 0:
            self._count_drafts(step)

    def _count_catching_up(self, seconds: float) -> None:
        if self._resumed is None:
            self._reading += (1 - DECAY) * seconds
        elif self._given is None:
            self._balance -= seconds / self._resumed.of(0)
        self._resumed = None

    def _count_drafts(self, step: StepOutcome) -> None:
        passed, failed = [0] * (self.most + 1), [0] * (self.most + 1)
        for row in step.results:
            if row.asked > 0 and not row.ended:
                passed[row.accepted] += 1
                # A draft that the drafter did not find counts as rejected: asking for it was in vain.
                failed[row.accepted] += row.accepted < row.asked
        reached = [*accumulate(reversed(passed))][::-1]  # how many rows had at least so many drafts accepted
        self._accepted = [DECAY * n + more for n, more in zip(self._accepted, reached[1:], strict=True)]
        news = zip(self._tested, reached[1:], failed, strict=False)
        self._tested = [DECAY * n + more + rejected for n, more, rejected in news]
        times = self.times(step.rows)
        times.found(step.num_drafts, step.width)
        if step.results and times.missing(step.num_drafts, SEEN) is None:
            emitted = sum(row.emitted for row in step.results) / len(step.results)
            self._balance += emitted - (times.of(step.width) + self._reading) / times.of(0)
