"""What a generation did, counted, and where its time went."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

PARTS = ("prefill", "measuring", "draft_forwards", "target_forwards", "kernels", "replays", "loop")


@dataclass
class Stats:
    """Counts of one sequence, or the sums over a batch.

    Every step emits its accepted drafts and then one recovered or bonus token, except a *cut* step: an
    end-of-sequence token was among its accepted drafts, or the target's row had no distribution. So always
    ``emitted == accepted + steps - cut_steps``. Drafts after an accepted end-of-sequence count as drafted,
    but not as tested. Nothing is drafted past ``max_new_tokens``. By position: index i is the (i+1)-th draft
    of its step. Rule ``block`` decides jointly: here, as with the others, the drafts that it accepted and the next one
    count as tested.
    """

    steps: int = 0  # of live sequences: a step of a batch counts once for each sequence that it moved
    cut_steps: int = 0
    emitted: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    tested_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    target_forwards: int = 0  # calls of the model after the prefill; a batch shares them
    draft_forwards: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # PARTS and "total"; the batch's only, {} for a sequence

    @classmethod
    def empty(cls, num_drafts: int) -> Stats:
        return cls(
            drafted_by_position=[0] * num_drafts,
            tested_by_position=[0] * num_drafts,
            accepted_by_position=[0] * num_drafts,
        )

    @classmethod
    def total(cls, parts: Iterable[Stats], num_drafts: int) -> Stats:
        """The sum over the sequences of a batch; forwards and seconds, which they share, are left to the caller."""
        total = cls.empty(num_drafts)
        for part in parts:
            for name in ("steps", "cut_steps", "emitted"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
            for name in ("drafted_by_position", "tested_by_position", "accepted_by_position"):
                setattr(
                    total,
                    name,
                    [a + b for a, b in zip(getattr(total, name), getattr(part, name), strict=True)],
                )
        return total

    def record(self, drafted: int, tested: int, accepted: int, emitted: int, draft_forwards: int) -> None:
        """Adds one step: it drafted so many tokens, tested the first ``tested`` and accepted the first ``accepted``."""
        self.steps += 1
        self.cut_steps += emitted == accepted
        self.emitted += emitted
        self.target_forwards += 1
        self.draft_forwards += draft_forwards
        for counts, count in (
            (self.drafted_by_position, drafted),
            (self.tested_by_position, tested),
            (self.accepted_by_position, accepted),
        ):
            for i in range(count):
                counts[i] += 1

    @property
    def drafted(self) -> int:
        return sum(self.drafted_by_position)

    @property
    def tested(self) -> int:
        return sum(self.tested_by_position)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_position)

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def alpha(self) -> float:
        """accepted / tested, the alpha of Leviathan et al. 2023; 0 where nothing was tested."""
        return self.accepted / self.tested if self.tested else 0.0

    @property
    def tau(self) -> float:
        """Mean acceptance length, emitted / steps; 0 where there was no step."""
        return self.emitted / self.steps if self.steps else 0.0

    def to_dict(self) -> dict:
        """Every count and ratio under its own name, for JSON."""
        ratios = ("drafted", "tested", "accepted", "acceptance_rate", "alpha", "tau")
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in ratios}}


class Stopwatch:
    """Wall time, cut into PARTS without a gap: each lap goes to the part that it names.

    On a GPU, work is still running when its call returns, so there a lap shows who issued or awaited it.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now

    def with_total(self) -> dict[str, float]:
        return {**self.seconds, "total": sum(self.seconds.values())}
