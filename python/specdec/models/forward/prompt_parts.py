"""The parts in which each text of a batch is read alone, and which of them another text may have a copy of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .prefill import PrefillChunk


class PromptParts:
    """A text is read in the parts [0, C), [C, 2C), ... and a shorter last one, each alone in a forward. What a forward
    of a full part stores depends on the text up to the part's end: not on the row, on its neighbours or on what
    follows. So another text that begins with the same tokens may have a copy, which is the same to the last bit as what
    reading them again would store.

    Args:
        chunk: of the model that reads. Once memory runs out it divides a part into several forwards, which round
            differently, so nothing is held any more of what was read before.
        size: C >= 1.
        rows: of the batch.
    """

    def __init__(self, chunk: PrefillChunk, size: int, rows: int):
        self.size = size
        self._held = [0] * rows
        self._taken: set[int] = set()  # rows whose next text was told what it takes over
        self._chunk, self._fed = chunk, chunk.size

    def held(self, row: int) -> int:
        """Returns how many tokens of a row, from its first, were read in full parts: a multiple of C."""
        self._chunk_changed()
        return self._held[row]

    def end_of(self, start: int, end: int) -> int:
        """Returns where the part ends that begins at ``start``, of a text of which ``end`` tokens are read."""
        return min(start - start % self.size + self.size, end)

    def read(self, row: int, start: int, end: int, feed: Callable[[int, int], None], again: int = 0) -> None:
        """Reads the tokens from ``start`` to ``end`` of the text in a row, by calls of ``feed`` with the bounds of each
        part.

        Args:
            again: how many of the last tokens will be fed once more in forwards of another shape, which write over what
                was stored.
        """
        first = start
        while first < end:
            last = self.end_of(first, end)
            feed(first, last)
            first = last
        if not self._chunk_changed() and start == self._held[row]:
            self._held[row] = max((end - again) // self.size * self.size, start)

    def take(self, sources: Sequence[int], rows: Sequence[int], count: int) -> None:
        """Notes that ``rows`` hold the first ``count`` tokens of what the rows ``sources`` hold, as far as these do."""
        found = [min(self.held(source), count // self.size * self.size) for source in sources]
        for row, held in zip(rows, found, strict=True):
            self._held[row] = held
        self._taken.update(rows)

    def begin(self, row: int) -> int:
        """Returns how many tokens of the text that begins in a row are held there: none, if ``take`` was not called for
        it, as by a session within another one that does not know of it."""
        if row not in self._taken:
            self._held[row] = 0
        self._taken.discard(row)
        return self.held(row)

    def _chunk_changed(self) -> bool:
        changed = self._chunk.size != self._fed
        if changed:
            self._held, self._fed = [0] * len(self._held), self._chunk.size
        return changed
