"""What speculation is expected to win: a step's tokens by measured acceptance, over its measured time. That, and what
else was found of one drafter, is ``Tried``.

Leviathan et al. (arXiv 2211.17192, theorem 3.8) assume that a wider forward of the target takes no longer, that all
positions are accepted alike, and that the loop itself is free. Here all three are measured instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..theory import tau_by_position
from .compatibility import Compatibility
from .costs import Measured

MARGIN = 1.03  # below it drafts are not worth their memory, and a measurement could not tell them from plain decoding


@dataclass(frozen=True)
class Prediction:
    """
    Attributes:
        num_drafts: K.
        tau: tokens that a step emits.
        step, plain: seconds of a step with K drafts, and without.
        speedup: over plain decoding by the same loop, for whole texts with the reading of their prompts.
        tokens_per_second: of all rows together.
    """

    num_drafts: int
    tau: float
    step: float
    plain: float
    speedup: float
    tokens_per_second: float

    @property
    def pays(self) -> bool:
        return self.speedup >= MARGIN


def predict(
    measured: Measured,
    num_drafts: int,
    tokens: int,
    *,
    by_position: Sequence[float] | None = None,
    faster_draft: float = 1.0,
) -> Prediction:
    """Predicts texts of ``tokens`` new tokens with K = ``num_drafts``.

    Args:
        by_position: the acceptance; None: as measured.
        faster_draft: how many times as fast the draft's forwards are as the measured ones.
    """
    chances = measured.acceptance.by_position() if by_position is None else by_position
    tau = tau_by_position(chances[:num_drafts])
    plain, step = measured.plain.median, measured.seconds(num_drafts)
    if faster_draft != 1 and num_drafts in measured.steps:
        step -= measured.steps[num_drafts].part("draft_forwards") * (1 - 1 / faster_draft)
    whole = measured.begin(num_drafts > 0) + tokens / tau * step
    alone = measured.begin(False) + tokens * plain
    return Prediction(num_drafts, tau, step, plain, alone / whole, measured.rows * tokens / whole)


def best(measured: Measured, tokens: int, **what_if: object) -> Prediction:
    """Returns the fastest of the K that were measured."""
    found = [predict(measured, k, tokens, **what_if) for k in sorted(measured.steps)]  # type: ignore[arg-type]
    return max(found, key=lambda p: p.speedup)


def more_accepted(by_position: Sequence[float], alpha: float, more: float) -> list[float]:
    """Returns the acceptance with ``more`` than ``alpha`` of all drafts: rejections become fewer by the same factor at
    every position, as where many are accepted already, fewer can be won."""
    left = max(1 - more / (1 - alpha), 0.0) if alpha < 1 else 1.0
    return [1 - left * (1 - chance) for chance in by_position]


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
