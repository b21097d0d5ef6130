"""Which tokens of a batch's rows the drafter has not seen, because steps had no drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .sequence import SequenceRecord


class UnseenTokens:
    """A drafter sees the tokens of a row in its steps with drafts. In steps without, it is not called, so it misses the
    prompts of new sequences, and what is emitted; the first step with drafts has to show it these."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}  # rows with unseen tokens -> how many tokens it has seen at least
        self._drafted = False  # in the step before

    def begin(self, row: int) -> None:
        """Begins a new sequence."""
        self._seen[row] = 0

    def note(self, rows: Sequence[SequenceRecord | None], num_drafts: int) -> None:
        """Notes a step that is about to run. In the first of several steps without drafts, the drafter has seen all
        that the host knows, except the last two tokens, which it is fed in its next step anyway."""
        if self._drafted and num_drafts == 0:
            for row, record in enumerate(rows):
                if record is not None and record.live:
                    self._seen.setdefault(row, max(len(record.text) - 2, 0))
        self._drafted = num_drafts > 0

    def rows(self, wanted: Sequence[int]) -> list[int]:
        """Returns the rows that want drafts and have unseen tokens."""
        return [row for row in self._seen if wanted[row]]

    def pop(self, rows: Sequence[int]) -> Mapping[int, int]:
        """Returns how many tokens of these rows the drafter has seen. It is about to see the others."""
        return {row: self._seen.pop(row) for row in rows}
