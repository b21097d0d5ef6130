"""How many tokens the rows of a batch draft in a step: a fixed number, or what emits the most tokens per second."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from ..checks import read_count, refuse


@dataclass(frozen=True)
class AdaptiveDrafts:
    """Chooses K in each step, such that the whole batch emits the most tokens per second. K is 0 where no draft pays.

    All rows of a step have the same K, because a step takes the time of its widest row. K follows from the recent
    acceptance of each row, and from T(K), the time of a step, which a decoder learns from its own steps, once for each
    number of rows. ``docs/decoding.md`` says how.

    Greedy texts, and those of rule ``coupled``, do not depend on K. A sampled text of ``token`` or ``block`` has the
    target's distribution whatever K is, but it is another one for the same seed if K differs, and so it depends on the
    times that were measured and on the other rows. There are two ways to get the same text for a seed, every time and
    in any company. While there are such texts, ``sampled`` fixes K, or makes it a function of the sequence and of given
    costs; ``alone`` does the latter in all steps. A step takes the time of its widest row, so that is slower than one K
    for all rows.

    Args:
        max_drafts: the largest K, >= 1.
        costs: T(0), ..., T(max_drafts) in any unit, finite, > 0, not decreasing. They are then taken as they are,
            for every number of rows, and nothing is measured: K is a function of the texts and of these numbers. None:
            they are learned. ``GenerationResult.step_costs`` returns learned ones.
        alone: each sequence has its own K, a function of ``costs`` and of the acceptance of its own drafts. It needs
            ``costs``, as learned ones differ from run to run.
        sampled: K of each step in which a row's text depends on K, from 0 to ``max_drafts``; or T(0), ...,
            T(max_drafts), as ``costs``: in such steps each sequence then has its own K, a function of these numbers and
            of the acceptance of its own drafts. None: chosen as in other steps.

    Raises:
        ValueError: names the argument.
    """

    max_drafts: int = 8
    costs: Sequence[float] | None = None
    alone: bool = False
    sampled: int | Sequence[float] | None = None

    def __post_init__(self) -> None:
        read_count("max_drafts", self.max_drafts, 1)
        if isinstance(self.sampled, Sequence) and not isinstance(self.sampled, str):
            self._check_costs("sampled", self.sampled)
        elif self.sampled is not None and read_count("sampled", self.sampled) > self.max_drafts:
            refuse("sampled", self.sampled, f"at most max_drafts={self.max_drafts}")
        if self.costs is not None:
            self._check_costs("costs", self.costs)
        elif self.alone:
            refuse("alone", "True without costs", "True with costs: learned costs differ from run to run")

    def _check_costs(self, name: str, given: Sequence[float]) -> None:
        costs = [float(c) for c in given]
        fine = all(math.isfinite(c) and c > 0 for c in costs) and costs == sorted(costs)
        if len(costs) != self.max_drafts + 1 or not fine:
            refuse(name, given, f"{self.max_drafts + 1} numbers > 0 that do not fall: T(0) to T(max_drafts)")


DEFAULT_DRAFTS = AdaptiveDrafts(sampled=4)


def most_drafts(num_drafts: int | AdaptiveDrafts) -> int:
    """Returns the largest K."""
    return num_drafts.max_drafts if isinstance(num_drafts, AdaptiveDrafts) else num_drafts


class RowResult(NamedTuple):
    """What a live row's step came to."""

    row: int
    asked: int  # how many drafts the row was to have; a drafter may have found fewer
    accepted: int
    emitted: int
    ended: bool  # the sequence ended in this step, so its drafts after that say nothing


class Remaining(NamedTuple):
    """How many tokens are still to be emitted, at most."""

    rooms: Mapping[int, int]  # by each live row
    waiting: Sequence[int] = ()  # by each sequence that waits for a row


NO_CAPS: Mapping[int, int] = MappingProxyType({})


class DraftLengths(Protocol):
    """Chooses how many tokens the sequence of each row drafts in its next step. Steps may be recorded late, so that K
    can be chosen while an earlier step still runs."""

    def begin(self, row: int) -> None:
        """Forgets the row's history for a new sequence."""

    def next(
        self,
        drafting: Sequence[int],
        live: int,
        remaining: Remaining | None = None,
        caps: Mapping[int, int] = NO_CAPS,
    ) -> Mapping[int, int]:
        """Returns K for each row of ``drafting``.

        Args:
            live: the number of rows that decode in the step, these among them.
            remaining: None: so much that its end is far away, and all that counts is tokens a second.
            caps: how many tokens some of these rows draft at most, >= 1, whatever K is.
        """

    def use(self, rows: int) -> None:
        """Tells how many rows the steps have from now on: those of all that was launched before are recorded."""

    def took(self, num_drafts: int, seconds: float) -> None:
        """Records the time of a step with K = ``num_drafts``."""

    def caught_up(self, seconds: float) -> None:
        """Records the time in which the drafter read what it had missed in steps without drafts."""

    def record(self, num_drafts: int, results: Sequence[RowResult]) -> None:
        """Records what the live rows of a step with K = ``num_drafts`` came to."""


@dataclass(frozen=True)
class FixedLengths:
    num_drafts: int

    def begin(self, row: int) -> None:
        pass

    def next(
        self,
        drafting: Sequence[int],
        live: int,
        remaining: Remaining | None = None,
        caps: Mapping[int, int] = NO_CAPS,
    ) -> Mapping[int, int]:
        return dict.fromkeys(drafting, self.num_drafts)

    def use(self, rows: int) -> None:
        pass

    def took(self, num_drafts: int, seconds: float) -> None:
        pass

    def caught_up(self, seconds: float) -> None:
        pass

    def record(self, num_drafts: int, results: Sequence[RowResult]) -> None:
        pass
