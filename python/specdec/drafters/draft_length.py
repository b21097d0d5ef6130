"""Chooses K, the number of drafts of a step: fixed, or the best one for measured acceptance and measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..checks import read_count, refuse

# The assumed history of a sequence before any draft was tested. It is optimistic, since only drafting shows acceptance.
PRIOR_ACCEPTED, PRIOR_TESTED = 1.6, 2.0
MEMORY = 0.9  # weight of older steps, for each step since: about the last ten count, because texts change
PROBE = 1  # drafts of the first step, and of every trial
PATIENCE = 64  # plain steps before unprofitable drafts are tried again; twice as many after each failed trial


@dataclass(frozen=True)
class AdaptiveDrafts:
    """Chooses K for each step, such that the most tokens are emitted per time.

    With alpha estimated from the sequence's recent drafts, a step with K drafts emits
    (1 - alpha^(K+1)) / (1 - alpha) tokens on average (Leviathan et al. 2023, equation 1) in the time T(K). K maximises
    the ratio of the two. If plain decoding is best, K is 0, and drafts are tried again after a while, ever more rarely.
    The first step drafts one token.

    All rows of a batch take the time of the row with the most drafts. Greedy texts, and those of rule ``coupled``, do
    not depend on K, so their rows have one K, the best one for all of them together. In other texts K has a part: such
    a sequence's K depends only on its own drafts and on T, not on its neighbours. T is measured once for each batch
    size, at the first step of a decoder's first generation, and kept. Decoders with the same ``costs`` draw the same
    texts from the same seed.

    Args:
        max_drafts: the largest K, >= 1.
        costs: T(0), ..., T(max_drafts) in any unit, finite, > 0, not decreasing; None: measured
            (``GenerationResult.step_costs`` returns the measured ones).

    Raises:
        ValueError: names the argument.
    """

    max_drafts: int = 8
    costs: Sequence[float] | None = None

    def __post_init__(self) -> None:
        read_count("max_drafts", self.max_drafts, 1)
        if self.costs is None:
            return
        costs = [float(c) for c in self.costs]
        fine = all(math.isfinite(c) and c > 0 for c in costs) and costs == sorted(costs)
        if len(costs) != self.max_drafts + 1 or not fine:
            refuse("costs", self.costs, f"{self.max_drafts + 1} numbers > 0 that do not fall: T(0) to T(max_drafts)")


def most_drafts(num_drafts: int | AdaptiveDrafts) -> int:
    """Returns the largest K."""
    return num_drafts.max_drafts if isinstance(num_drafts, AdaptiveDrafts) else num_drafts


class DraftLengths(Protocol):
    """Chooses how many tokens the sequence of each row drafts in its next step."""

    def begin(self, row: int) -> None:
        """Forgets the row's history for a new sequence."""

    def next(self, together: Sequence[int], alone: Sequence[int]) -> Mapping[int, int]:
        """Returns K by row, for these rows.

        Args:
            together: rows whose texts do not depend on K, so that they may consider all rows.
            alone: rows whose K may depend on nothing but their own sequences.
        """

    def record(self, row: int, tested: int, accepted: int) -> None: ...


@dataclass(frozen=True)
class FixedLengths:
    num_drafts: int

    def begin(self, row: int) -> None:
        pass

    def next(self, together: Sequence[int], alone: Sequence[int]) -> Mapping[int, int]:
        return dict.fromkeys((*together, *alone), self.num_drafts)

    def record(self, row: int, tested: int, accepted: int) -> None:
        pass


@dataclass
class _History:
    accepted: float = PRIOR_ACCEPTED
    tested: float = PRIOR_TESTED
    probing: bool = True  # nothing was tested yet, or not since a trial was due

    @property
    def alpha(self) -> float:
        return self.accepted / self.tested


@dataclass
class _Pause:
    """Plain steps, between trials of drafts that do not pay."""

    left: int = 0  # plain steps until the next trial
    patience: int = PATIENCE


class AdaptiveLengths:
    """One generation's choices under :class:`AdaptiveDrafts`.

    Args:
        costs: T(0), T(1), ...
    """

    def __init__(self, costs: Sequence[float], batch_size: int):
        self._costs = costs
        self._histories = [_History() for _ in range(batch_size)]
        self._pauses = [_Pause() for _ in range(batch_size)]
        self._pause_together = _Pause()

    def begin(self, row: int) -> None:
        self._histories[row], self._pauses[row] = _History(), _Pause()

    def next(self, together: Sequence[int], alone: Sequence[int]) -> Mapping[int, int]:
        chosen = {row: self._choose([row], self._pauses[row]) for row in alone}
        # What the other rows emit anyway, in a step that is as wide as they want it.
        emitted = sum(expected_tokens(self._histories[row].alpha, k) for row, k in chosen.items())
        width = max(chosen.values(), default=0)
        return chosen | dict.fromkeys(together, self._choose(together, self._pause_together, emitted, width))

    def _choose(self, rows: Sequence[int], pause: _Pause, others: float = 0.0, least: int = 0) -> int:
        """Returns one K for these rows.

        Args:
            others: the tokens that other rows emit in the step.
            least: the K of the other rows; fewer drafts cost as many.
        """
        if not rows:
            return 0
        histories = [self._histories[row] for row in rows]
        best = best_length([h.alpha for h in histories], self._costs, others, least)
        if best == 0 and pause.left > 0:
            pause.left -= 1
            return 0
        if all(h.probing for h in histories):
            return min(PROBE, len(self._costs) - 1)
        if best == 0:
            pause.left = pause.patience - 1
            pause.patience *= 2
            for h in histories:
                h.probing = True
        return best

    def record(self, row: int, tested: int, accepted: int) -> None:
        if tested == 0:
            return
        h = self._histories[row]
        if h.probing:
            h.probing = False
            if accepted:
                h.accepted, h.tested = PRIOR_ACCEPTED, PRIOR_TESTED
                self._pauses[row].patience = self._pause_together.patience = PATIENCE
        h.accepted = MEMORY * h.accepted + accepted
        h.tested = MEMORY * h.tested + tested


def expected_tokens(alpha: float, num_drafts: int) -> float:
    """Returns how many tokens a sequence emits in a step, on average: (1 - alpha^(K+1)) / (1 - alpha)."""
    return sum(alpha**k for k in range(num_drafts + 1))


def best_length(alphas: Sequence[float], costs: Sequence[float], others: float = 0.0, least: int = 0) -> int:
    """Returns the K >= ``least`` with the most emitted tokens per time, the smallest one of several.

    Args:
        alphas: of the sequences that are to draft K tokens each.
        costs: T(0), T(1), ...
        others: the tokens that other sequences emit in the step.
    """
    emitted, rates = others, []
    for k, cost in enumerate(costs):
        emitted += sum(alpha**k for alpha in alphas)
        rates.append(emitted / cost)
    return max(range(least, len(rates)), key=rates.__getitem__)


def step_costs(
    max_drafts: int, draft: Callable[[int], float], verify: Callable[[int], float], rounds: int = 3
) -> list[float]:
    """Measures T(0), ..., T(max_drafts), in units of T(0), rounded to hundredths.

    Forwards of one and of two tokens differ by more than forwards of two and of three (a matrix times a vector, or
    times a matrix), so T is modelled as a line from K = 1 on and a separate point at 0. The measurements take turns,
    so that other load on the machine affects all alike, and the fastest of ``rounds`` counts.

    Args:
        draft: returns the seconds that this number of drafts takes.
        verify: returns the seconds of a target forward over this number of tokens.
        rounds: how often everything is measured.
    """
    drafts = min(2, max_drafts)
    taken = [(draft(drafts) / drafts, verify(1), verify(2), verify(max_drafts + 1)) for _ in range(rounds)]
    each, plain, one, most = (min(times) for times in zip(*taken, strict=True))
    slope = (most - one) / max(max_drafts - 1, 1)
    costs = [plain, *(one + slope * (k - 1) + each * k for k in range(1, max_drafts + 1))]
    relative, so_far = [], 0.0
    for cost in costs:  # measurement noise must not make a longer step cheaper
        so_far = max(so_far, round(cost / plain, 2))
        relative.append(so_far)
    return relative
