"""How often drafts are accepted, by their position in a step."""

from __future__ import annotations

from collections.abc import Sequence

from ...loop.draft_length import RowResult

LIKE_BEFORE = 4.0  # tests that the position before counts for


class Acceptance:
    """Tests of drafts, counted by position. A draft that the drafter did not find counts as rejected, as it does for
    ``AdaptiveDrafts``: the step was paid for in vain."""

    def __init__(self, most_drafts: int):
        self.tested, self.accepted = [0] * most_drafts, [0] * most_drafts

    def record(self, results: Sequence[RowResult]) -> None:
        """Adds the results of the rows of a step. In a step that ends a sequence, drafts after its end say nothing."""
        for result in results:
            if result.ended:
                continue
            for i in range(min(result.accepted + 1, result.asked)):
                self.tested[i] += 1
                self.accepted[i] += i < result.accepted

    @property
    def alpha(self) -> float:
        """accepted / tested; 0 if nothing was tested."""
        return sum(self.accepted) / sum(self.tested) if sum(self.tested) else 0.0

    def by_position(self) -> list[float]:
        """Returns the chance that draft 1, 2, ... is accepted if those before it were. A position that was hardly ever
        tested is expected to be like the one before."""
        found: list[float] = []
        for tested, accepted in zip(self.tested, self.accepted, strict=True):
            if found:
                found.append((accepted + LIKE_BEFORE * found[-1]) / (tested + LIKE_BEFORE))
            else:
                found.append(accepted / tested if tested else 0.0)
        return found
