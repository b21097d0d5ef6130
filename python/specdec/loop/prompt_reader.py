"""Reads the prompts of sequences that have a row: of all at once, or of one after the other, in parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from ..drafters.guard import GuardedSession
from ..models.cache.kv_cache import StaticKVCache
from ..models.forward.prompt_parts import PromptParts
from .batch_config import BatchConfig
from .prefixes import Prefixes
from .sequence import SequenceState


class PromptReader:
    """Stores the prompts of a batch in the target's cache, all but their last tokens, which are fed with the first
    drafts.

    Args:
        sequences: the batch's, by row, which it updates.
        begin: called with sequences whose prompts are stored.
        show: shows the drafter what it has not seen of the text in a row.
        lowest: as of ``Prefixes``.

    Attributes:
        unread: those that have a row, and whose prompts are not read yet.
    """

    def __init__(
        self,
        config: BatchConfig,
        sequences: list[SequenceState | None],
        cache: StaticKVCache,
        session: GuardedSession | None,
        begin: Callable[[list[SequenceState]], None],
        show: Callable[[int], None],
        lowest: bool,
    ):
        self.unread: deque[SequenceState] = deque()
        self._target, self._sequences, self._cache, self._begin = config.target, sequences, cache, begin
        self.parts = PromptParts(config.target.prefill_chunk, config.prefill_chunk or config.capacity, config.size)
        self.prefixes = Prefixes(config.prefix_reuse, sequences, cache, self.parts, session, show, lowest)

    def add(self, sequences: Mapping[int, SequenceState]) -> None:
        """Gives free rows to sequences."""
        for row, sequence in sequences.items():
            self._sequences[row] = sequence
            self.unread.append(sequence)

    def place(self, sequence: SequenceState) -> None:
        """Gives a sequence a free row, with what the rows hold of its prompt's beginning."""
        self.add({self.prefixes.place(sequence): sequence})

    def read_all(self) -> None:
        """Reads all prompts at once. All rows of the batch must have been added."""
        sequences = list(self.unread)
        if not sequences:
            return

        def score(i: int, *fed: object) -> None:
            if sequences[i].request.prompt_log_probs is not None:
                sequences[i].score_prompt(*fed)  # type: ignore[arg-type]

        scored = any(s.request.prompt_log_probs is not None for s in sequences)
        self._target.prefill(self._cache, [s.text[:-1] for s in sequences], score if scored else None)
        self.unread.clear()
        self._begin(sequences)

    def read_part(self) -> int:
        """Reads the next part of the first prompt, alone, and returns its number of tokens. Its bounds, and so its
        keys, depend on the prompt alone."""
        sequence = self.unread[0]
        extend, cache, text = self._target.extend, self._cache, sequence.text
        row, start = self._sequences.index(sequence), sequence.stored
        end = self.parts.end_of(start, len(text) - 1)
        if sequence.request.prompt_log_probs is None:
            self.parts.read(row, start, end, lambda a, b: extend(cache, [text[:b]], [a], row))
        elif end > start:  # in smaller forwards, so no other prompt can have what they store
            extend(cache, [text[:end]], [start], row, lambda _, *fed: sequence.score_prompt(*fed))
        sequence.stored = end
        if end == len(text) - 1:
            self.unread.popleft()
            self._begin([sequence])
        return end - start

    def leave(self, row: int) -> None:
        """The sequence in this row has ended. What it stored stays there until the row is needed."""
        self.prefixes.leave(row)
        sequence = self._sequences[row]
        if sequence is not None and sequence in self.unread:
            self.unread.remove(sequence)
