"""What the drafter has not seen of the texts of a batch: prompts, and tokens of steps without drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter

from ..drafters.guard import GuardedSession
from .sequence import SequenceState, decoding


class UnseenTexts:
    """Shows the drafter what it has not seen, before it drafts for a row.

    Args:
        sequences: the batch's, by row.
        read: reads the reports of all steps of these sequences, since the host must know a text to show it.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceState | None],
        session: GuardedSession | None,
        read: Callable[[Mapping[int, SequenceState]], None],
    ):
        self._sequences, self._session, self._read = sequences, session, read
        self._drafted = False  # in the step before
        self._seconds: float | None = None

    def note(self, drafting: bool) -> None:
        """Notes a step that is about to run. The drafter sees the tokens of rows in steps with drafts. In the first of
        several steps without, it has seen all that the host knows, except the last two tokens, which it is fed in its
        next step anyway."""
        if self._drafted and not drafting:
            for sequence in decoding(self._sequences).values():
                if sequence.unseen is None:
                    sequence.unseen = max(len(sequence.text) - 2, 0)
        self._drafted = drafting

    def show(self, rows: Iterable[int]) -> None:
        """Shows the drafter what was emitted in steps without drafts, and the prompts of new sequences, in the rows
        that draft now."""
        there = {row: sequence for row in rows if (sequence := self._sequences[row]) is not None}
        unseen = {row: sequence for row, sequence in there.items() if sequence.unseen is not None}
        if not unseen or self._session is None:
            return
        self._read(unseen)
        began = perf_counter()
        live = {row: sequence for row, sequence in unseen.items() if sequence.live}
        if live:
            starts = {row: sequence.unseen or 0 for row, sequence in live.items()}
            self._session.observe({row: sequence.text for row, sequence in live.items()}, starts)
        for sequence in live.values():
            sequence.unseen = None
        self._seconds = (self._seconds or 0.0) + perf_counter() - began

    def show_row(self, row: int) -> None:
        """The same of one row, if the drafter drafts for it at all."""
        sequence = self._sequences[row]
        if sequence is not None and sequence.may_draft and self._session is not None and self._session.alive:
            self.show([row])

    def take_seconds(self) -> float | None:
        """Returns how long the drafter has read since the last call; None: it had nothing to read."""
        seconds, self._seconds = self._seconds, None
        return seconds
