"""Counts of what a generation did, and where its time went."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

PARTS = ("prefill", "draft_forwards", "target_forwards", "kernels", "replays", "loop")


@dataclass
class Stats:
    """Counts of one sequence, or the sums over a batch.

    Every step emits its accepted drafts and then one recovered or bonus token, except a *cut* step, which has an
    end-of-sequence token among its accepted drafts or a target row without a distribution. So always
    ``emitted == accepted + steps - cut_steps``. Drafts after an accepted end-of-sequence token count as drafted,
    but not as tested. Nothing is drafted past ``max_new_tokens``. In the lists by position, index i is the (i+1)-th
    draft of its step. Rule ``block`` decides about all drafts jointly; as with the other rules, the accepted drafts
    and the one after them count as tested.

    Of a tree, what is drafted, tested and accepted is counted by depth, and each depth counts once: all depths of the
    tree as drafted, the nodes of the path as accepted, and these and the depth of siblings that were all rejected as
    tested. ``nodes`` has the nodes themselves.

    Example:
        >>> from specdec import Stats
        >>> stats = Stats.empty(num_drafts=4)
        >>> stats.record(drafted=4, tested=3, accepted=2, emitted=3, draft_forwards=4)  # two accepted, one recovered
        >>> stats.acceptance_rate, round(stats.alpha, 2), stats.tau
        (0.5, 0.67, 3.0)
    """

    steps: int = 0  # a step of a batch counts once for each live sequence
    cut_steps: int = 0
    emitted: int = 0
    nodes: int = 0  # drafts that counted: of a tree all its nodes, of a chain as many as were drafted
    drafted_by_position: list[int] = field(default_factory=list)
    tested_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    target_forwards: int = 0  # calls of the model after the prefill; the sequences of a batch share them
    draft_forwards: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # PARTS and "total" of the batch; {} for one sequence

    @classmethod
    def empty(cls, num_drafts: int) -> Stats:
        """Returns the counts of no step, with lists for up to ``num_drafts`` drafts."""
        return cls(
            drafted_by_position=[0] * num_drafts,
            tested_by_position=[0] * num_drafts,
            accepted_by_position=[0] * num_drafts,
        )

    @classmethod
    def total(cls, parts: Iterable[Stats], num_drafts: int) -> Stats:
        """Returns the sum over the sequences of a batch, without forwards and seconds, which the sequences share."""
        total = cls.empty(num_drafts)
        for part in parts:
            for name in ("steps", "cut_steps", "emitted", "nodes"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
            for name in ("drafted_by_position", "tested_by_position", "accepted_by_position"):
                setattr(total, name, [a + b for a, b in zip(getattr(total, name), getattr(part, name), strict=True)])
        return total

    def record(
        self, drafted: int, tested: int, accepted: int, emitted: int, draft_forwards: int, nodes: int | None = None
    ) -> None:
        """Adds one step with ``drafted`` drafts, the first ``tested`` of them tested, the first ``accepted``
        accepted.

        Args:
            nodes: of a tree; None: the drafts are a chain.
        """
        self.steps += 1
        self.nodes += drafted if nodes is None else nodes
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
        """Proposed tokens."""
        return sum(self.drafted_by_position)

    @property
    def tested(self) -> int:
        """Drafts that were accepted, and those at which acceptance ended. Drafts after a rejection are not tested."""
        return sum(self.tested_by_position)

    @property
    def accepted(self) -> int:
        """Drafts that were emitted."""
        return sum(self.accepted_by_position)

    @property
    def steps_by_drafts(self) -> list[int]:
        """How many steps had k drafts, for each k from 0 on."""
        at_least = [self.steps, *self.drafted_by_position, 0]
        return [more - fewer for more, fewer in itertools.pairwise(at_least)]

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def alpha(self) -> float:
        """accepted / tested, the alpha of Leviathan et al. 2023; 0 if nothing was tested."""
        return self.accepted / self.tested if self.tested else 0.0

    @property
    def tau(self) -> float:
        """Mean acceptance length, emitted / steps; 0 if there was no step."""
        return self.emitted / self.steps if self.steps else 0.0

    def __repr__(self) -> str:
        shown = {**self.to_dict(), "seconds": {part: round(value, 3) for part, value in self.seconds.items()}}
        values = (
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in shown.items()
        )
        return f"Stats({', '.join(values)})"

    def to_dict(self) -> dict:
        """Returns every count and ratio under its own name, for JSON."""
        ratios = ("drafted", "tested", "accepted", "acceptance_rate", "alpha", "tau", "steps_by_drafts")
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in ratios}}


class Timer:
    """Wall time, divided into PARTS without gaps: each lap adds the time since the previous one to a part.

    On a GPU, work is still running when its call returns, so there a lap measures issuing or awaiting the work.
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
