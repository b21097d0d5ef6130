"""Says once that a drafter is of no use, where nothing of its first drafts was accepted."""

from __future__ import annotations

import warnings

from ..drafters.protocol import Drafter

# Drafted tokens. With K = 4 and nothing accepted, 75 of them were tested: of drafters with alpha 0.1, that happens to 4
# in 10,000.
ENOUGH = 300


class FirstDrafts:
    """Counts the first drafted tokens of a decoder, over all its batches. Texts are right whatever is drafted, so a
    draft model of another target, or one whose numbers overflow, would not be noticed otherwise.

    Args:
        drafter: only those with a ``doubt`` are watched: copies of a text that does not repeat are no mistake.
    """

    def __init__(self, drafter: Drafter | None):
        self._doubt = None if drafter is None else drafter.doubt
        self._name = "" if drafter is None else drafter.name
        self._drafted = 0

    def note(self, drafted: int, accepted: int) -> None:
        """Notes what a step drafted for one sequence, and how many of it were accepted."""
        if self._doubt is None:
            return
        self._drafted += drafted
        if accepted:
            self._doubt = None
        elif self._drafted >= ENOUGH:
            told = f"none of the first {self._drafted} tokens that were drafted ({self._name}) was accepted"
            warnings.warn(f"{told}: texts are right, and only slower. {self._doubt}", RuntimeWarning, 2)
            self._doubt = None
