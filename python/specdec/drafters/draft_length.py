"""How many tokens to draft: a number, or what pays, from measured acceptance and measured costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..checks import read_count, refuse

# What is believed of a sequence's drafts before any was tested: much, as what is never tried is never learnt.
PRIOR_ACCEPTED, PRIOR_TESTED = 1.6, 2.0
MEMORY = 0.9  # weight of older steps: the last ten count, as texts change
PROBE = 1  # drafts of the first step, and of every trial
PATIENCE = 64  # plain steps before drafts that did not pay are tried again; twice as many each time


@dataclass(frozen=True)
class AdaptiveDrafts:
    """K for each sequence and step by itself: as many drafts as emit the most tokens in the time that they take.

    With alpha the sequence's recent acceptance, K drafts emit (1 - alpha^(K+1)) / (1 - alpha) tokens a step on average
    (Leviathan et al. 2023, equation 1), in the time T(K) of a step. K maximises their ratio, and is 0 where nothing is
    better than plain decoding; after a while drafts are then tried again, ever more rarely. The first step tries one.

    A sequence's K depends on its own drafts and on T alone, not on its neighbours. T is measured once for each batch
    size, on the first step of a decoder's first generation, and then stays: decoders that are given the same ``costs``
    draw the same texts from the same seed. (Greedy texts, and those of rule ``coupled``, depend on no K at all.)

    Args:
        max_drafts: the largest K, >= 1.
        costs: T(0), ..., T(max_drafts) in any unit, finite, > 0, not falling; None: to be measured
            (``GenerationResult.step_costs`` says what was).

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
    """The largest K."""
    return num_drafts.max_drafts if isinstance(num_drafts, AdaptiveDrafts) else num_drafts


class DraftLengths(Protocol):
    """Says how many tokens each row's sequence drafts in its next step."""

    def begin(self, row: int) -> None:
        """It has a new sequence."""

    def next(self, row: int) -> int: ...

    def record(self, row: int, tested: int, accepted: int) -> None: ...


@dataclass(frozen=True)
class FixedLengths:
    num_drafts: int

    def begin(self, row: int) -> None:
        pass

    def next(self, row: int) -> int:
        return self.num_drafts

    def record(self, row: int, tested: int, accepted: int) -> None:
        pass


@dataclass
class _History:
    accepted: float = PRIOR_ACCEPTED
    tested: float = PRIOR_TESTED
    plain_left: int = 0  # plain steps until the next trial
    patience: int = PATIENCE
    probing: bool = True


class AdaptiveLengths:
    """One generation's choices under :class:`AdaptiveDrafts`.

    Args:
        costs: T(0), T(1), ...
    """

    def __init__(self, costs: Sequence[float], batch_size: int):
        self._costs = costs
        self._histories = [_History() for _ in range(batch_size)]

    def begin(self, row: int) -> None:
        self._histories[row] = _History()

    def next(self, row: int) -> int:
        h = self._histories[row]
        if h.plain_left > 0:
            h.plain_left -= 1
            return 0
        if h.probing:
            return min(PROBE, len(self._costs) - 1)
        best = best_length(h.accepted / h.tested, self._costs)
        if best == 0:
            h.plain_left, h.probing = h.patience - 1, True
            h.patience *= 2
        return best

    def record(self, row: int, tested: int, accepted: int) -> None:
        if tested == 0:
            return
        h = self._histories[row]
        if h.probing:
            h.probing = False
            if accepted:
                h.accepted, h.tested, h.patience = PRIOR_ACCEPTED, PRIOR_TESTED, PATIENCE
        h.accepted = MEMORY * h.accepted + accepted
        h.tested = MEMORY * h.tested + tested


def best_length(alpha: float, costs: Sequence[float]) -> int:
    """The K that emits the most tokens over time, of several the smallest. ``costs``: T(0), T(1), ..."""
    emitted, rates = 0.0, []
    for k, cost in enumerate(costs):
        emitted += alpha**k
        rates.append(emitted / cost)
    return max(range(len(rates)), key=rates.__getitem__)


def step_costs(
    max_drafts: int, draft: Callable[[int], float], verify: Callable[[int], float], rounds: int = 3
) -> list[float]:
    """T(0), ..., T(max_drafts) in units of T(0), rounded to hundredths.

    A forward of one token and of two differ by more than those of two and three do (a matrix times a vector, or times a
    matrix), so T is a line from K = 1 on, and another point at 0. All that is measured takes turns, and of ``rounds``
    the fastest counts: what else a machine does hits all alike.

    Args:
        draft: the seconds that so many drafts take. verify: the seconds of a target forward over so many tokens.
    """
    drafts = min(2, max_drafts)
    taken = [(draft(drafts) / drafts, verify(1), verify(2), verify(max_drafts + 1)) for _ in range(rounds)]
    each, plain, one, most = (min(times) for times in zip(*taken, strict=True))
    slope = (most - one) / max(max_drafts - 1, 1)
    costs = [plain, *(one + slope * (k - 1) + each * k for k in range(1, max_drafts + 1))]
    relative, so_far = [], 0.0
    for cost in costs:  # noise must not make a longer step cheaper
        so_far = max(so_far, round(cost / plain, 2))
        relative.append(so_far)
    return relative
