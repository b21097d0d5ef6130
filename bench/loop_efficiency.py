"""What a loop makes of its steps: windows of a run, and what acceptance and costs allow (Leviathan et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Mark(NamedTuple):
    """Where a run stands after a step."""

    seconds: float
    tokens: int  # of all sequences
    steps: int


class Window(NamedTuple):
    seconds: float
    tokens: int
    steps: int


def windows(marks: Sequence[Mark], tokens: int) -> list[Window]:
    """Consecutive stretches of a run, each up to the first mark with so many more tokens. The first mark is where the
    first begins; an unfinished one is left out."""
    found, begin = [], marks[0]
    for mark in marks[1:]:
        if mark.tokens - marks[0].tokens >= tokens * (len(found) + 1):
            found.append(Window(*(now - then for now, then in zip(mark, begin, strict=True))))
            begin = mark
    return found


def tau(found: Sequence[Window], batch: int) -> float:
    """Tokens of a sequence in a step."""
    return sum(w.tokens for w in found) / sum(w.steps for w in found) / batch


def expected_tokens(alpha: float, num_drafts: int) -> float:
    """Of a step, were every draft accepted with this chance on its own (section 3.1): (1 - a^(K+1)) / (1 - a)."""
    return sum(alpha**i for i in range(num_drafts + 1))


def allowed_speedup(alpha: float, num_drafts: int, cost: float) -> float:
    """Theorem 3.8, with a draft's forward taking ``cost`` of a target's, whose width costs nothing."""
    return expected_tokens(alpha, num_drafts) / (num_drafts * cost + 1)


def of_allowed(speedup: float, tau: float, num_drafts: int, cost: float) -> float:
    """The loop's efficiency, speed-up over tau, as a part of what ``cost`` allows, 1 / (K cost + 1)."""
    return speedup / tau * (num_drafts * cost + 1)


def outside(step_seconds: float, forward_seconds: float) -> float:
    """The part of a step in which no model runs; below 0 where measurements are less exact than that."""
    return 1 - forward_seconds / step_seconds
