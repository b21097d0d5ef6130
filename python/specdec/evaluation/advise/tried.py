"""What was found of one drafter."""

from __future__ import annotations

from dataclasses import dataclass

from .compatibility import Compatibility
from .prediction import Prediction


@dataclass(frozen=True)
class Memory:
    """Bytes: of weights, of the cache for each token of a sequence, and of states for each sequence, whatever its
    length. What a draft shares with the target is none of its own."""

    target: int
    draft: int
    target_slot: int
    draft_slot: int
    target_row: int
    draft_row: int


@dataclass(frozen=True)
class Tried:
    """What was found of one drafter, greedily with one sequence.

    Attributes:
        has_model: whether drafts come from a model, and not from the text.
        best: of ``steps``.
        steps: predictions by K.
        alpha, by_position, tested: of its drafts; tests by position say how sure the acceptance is.
        plain_forward: seconds of the target's forward over one token.
        parts: seconds of the forwards of a step, by K; the rest of it is the loop's.
        half_the_draft, more_alpha: the best K if its forwards took half as long; with 0.05 more alpha.
    """

    name: str
    has_model: bool
    best: Prediction
    steps: dict[int, Prediction]
    alpha: float
    by_position: list[float]
    tested: list[int]
    plain_forward: float
    parts: dict[int, dict[str, float]]
    memory: Memory
    compatibility: Compatibility | None
    half_the_draft: Prediction
    more_alpha: Prediction

    @property
    def c(self) -> float:
        """The time of a draft forward over that of a plain forward of the target."""
        k = self.best.num_drafts
        return self.parts[k]["draft_forwards"] / k / self.plain_forward if self.plain_forward else 0.0
