"""Who drafts each row of a step, and how many tokens, where a drafter that copies is beside another one.

Both are known from what they did: copies by how many tokens before them matched (``CopiedK``), the other drafter by the
position of its drafts (``AdaptiveK``), and each of the two kinds of steps by its own times. A step in which all rows
copy spares the other drafter's forwards. In any other step, a row copies where this is expected to give more accepted
tokens than the other drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from ..drafters.composite import by_match
from ..drafters.protocol import Copies, Share
from .copied_length import CopiedK
from .draft_length import AdaptiveDrafts, AdaptiveK, DraftLength, StepOutcome
from .step_times import SEEN


class SharedK(DraftLength):
    """Chooses who drafts, and K, such that the batch emits the most tokens a second."""

    adapts = True

    def __init__(self, drafts: AdaptiveDrafts):
        self.copied, self.drafted = CopiedK(drafts), AdaptiveK(drafts, few=False)
        super().__init__(self.copied.most, self.copied.fixed)

    def chooses(self, text_depends: bool) -> bool:
        return self.drafted.chooses(text_depends)

    def choose(self, rows: int, live: int, caps: Sequence[int]) -> int:
        return self.most

    def share(self, rows: int, live: int, copies: Copies, allowed: Sequence[int], behind: bool) -> Share:
        caps = [most for most in allowed if most]
        times = self.drafted.times(rows)
        k = min(self.drafted.choose(rows, live, caps), max(caps))
        if times.missing(max(caps), SEEN) is not None:  # too little is known to compare the two
            shared = by_match(copies, [min(most, k) for most in allowed], behind)
            return shared if k else Share(0, [True] * len(allowed))
        alone, gained = [*accumulate(self.drafted.acceptance()[:k], mul)], float(live)
        copying = []
        for most, (tokens, matched, votes) in zip(allowed, copies.of_rows(), strict=True):
            own = sum(alone[:most])
            copied = sum(self.copied.chances.accepted(matched, min(len(tokens), k, most), votes))
            copying.append(copied > own)
            gained += max(own, copied) if most else 0.0
        width, rate = self.copied.best(rows, live, copies)
        copied_times = self.copied.times(rows)
        if width and not behind:  # what the other drafter misses it has to read later, in a forward
            forward = max(times.of(1) - copied_times.of(1), 0.0)
            rate *= copied_times.of(width) / (copied_times.of(width) + forward)
        left = any(most and not copies_it for most, copies_it in zip(allowed, copying, strict=True))
        if k == 0 or not left or (width and rate > gained / times.of(k)):
            return Share(self.copied.around(width, copies), [True] * len(allowed))
        return Share(k, copying)

    def observe(self, step: StepOutcome) -> None:
        if not step.forwards:  # a plain step, too
            self.copied.observe(step)
            if step.width == 0:
                self.drafted.observe(step._replace(num_drafts=0, results=()))
            return
        for row in step.results:
            if row.copy is not None:
                self.copied.chances.learn(*row.copy)
        k = step.num_drafts
        own = [row._replace(asked=min(row.asked, k)) for row in step.results if not row.one_hot]
        self.drafted.observe(step._replace(results=own))

    def costs(self, rows: int) -> list[float] | None:
        return self.drafted.costs(rows)
