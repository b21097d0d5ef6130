"""What the rows of a batch still hold of texts, and which row a new prompt is given to continue from there.

The rows are the cache: what an ended sequence stored stays in its row until another one needs the row, and nothing else
is allocated. A prompt takes the longest beginning that any row holds, also one that decodes: what is stored of a text's
known tokens does not change any more.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from ..drafters.guard import GuardedSession
from ..drafters.universal import common_length
from ..models.cache.kv_cache import StaticKVCache
from ..models.forward.prompt_parts import PromptParts
from ..result import FinishReason
from .sequence import SequenceState


class PrefixReuse(enum.StrEnum):
    """What of earlier texts a prompt takes over.

    ``EXACT``: full parts of prompts, which are the same to the last bit as if they were read again. ``ROUNDING``: also
    generated tokens and the last part of a prompt, which were computed by forwards of other shapes: where the target
    has a near-tie, the text may be another one.
    """

    OFF = "off"
    EXACT = "exact"
    ROUNDING = "rounding"


class Prefixes:
    """Chooses the row of each new sequence, and copies into it what can be taken over.

    Args:
        sequences: the batch's, by row.
        parts: of the target.
        show: shows the drafter what it has not seen of the text in a row, so that this can be copied, too.
        lowest: whether every sequence gets the lowest free row, since steps have the rows up to the highest in use.
    """

    def __init__(
        self,
        reuse: PrefixReuse,
        sequences: Sequence[SequenceState | None],
        cache: StaticKVCache,
        parts: PromptParts,
        session: GuardedSession | None,
        show: Callable[[int], None],
        lowest: bool,
    ):
        self._reuse, self._sequences, self._cache, self._parts = reuse, sequences, cache, parts
        self._session, self._show, self._lowest = session, show, lowest
        self._texts: list[list[int]] = [[] for _ in sequences]  # of each row; of a free one, what can be taken over
        self._scopes: list[object] = [None] * len(sequences)
        self._used, self._time = [0] * len(sequences), 0  # when each row was used last

    def place(self, sequence: SequenceState) -> int:
        """Returns a free row, which then holds the first ``sequence.stored`` tokens of the prompt."""
        free = [row for row, other in enumerate(self._sequences) if other is None]
        counts = [self._count(sequence, row) for row in range(len(self._sequences))]
        source = max(range(len(counts)), key=lambda row: (counts[row], self._used[row]))
        count = counts[source]
        # What begins in the same way and then differs, as after a system prompt, must not take a long text's place.
        if count > 0 and source in free and 2 * count >= self._held(source):
            row = source
        else:  # an empty one, or the one that was used least recently
            row = min(free, key=lambda row: self._used[row] if self._held(row) else 0)
        if count > 0 and self._sequences[source] is not None:
            self._show(source)
            count = min(count, self._held(source))  # its sequence may have failed, as was read just now
        if self._lowest and row != free[0]:
            source = {row: free[0], free[0]: row}.get(source, source)
            row = self._exchange(row, free[0])
        source = source if count > 0 else row
        self._texts[row] = []  # until everything is copied
        self._copy([source], [row], count)
        self._cache.begin(row, count)
        self._texts[row], self._scopes[row] = sequence.text, sequence.request.scope
        self._touch(source, row)
        sequence.stored, sequence.reused = count, count if self._may_take(sequence) else None
        return row

    def leave(self, row: int) -> None:
        """The row's sequence has ended."""
        sequence = self._sequences[row]
        assert sequence is not None
        # What a sequence that failed has stored may be anything.
        kept = self._reuse is not PrefixReuse.OFF and sequence.finish_reason is not FinishReason.FAILED
        self._texts[row] = self._texts[row][: self._held(row)] if kept else []
        self._touch(row)

    def _may_take(self, sequence: SequenceState) -> bool:
        """Whether its prompt may take over anything. One whose log-probabilities are wanted has to be read."""
        return self._reuse is not PrefixReuse.OFF and sequence.request.prompt_log_probs is None

    def _count(self, sequence: SequenceState, row: int) -> int:
        """Returns how many tokens of the prompt can be taken over from a row. The last one is fed with the first
        drafts."""
        if not self._may_take(sequence) or self._scopes[row] != sequence.request.scope:
            return 0
        same = min(common_length(sequence.text, self._texts[row]), len(sequence.text) - 1, self._held(row))
        return same if self._reuse is PrefixReuse.ROUNDING else same - same % self._parts.size

    def _held(self, row: int) -> int:
        """Returns how many tokens of the row's text are stored, and can be taken over."""
        if self._reuse is not PrefixReuse.ROUNDING:
            return self._parts.held(row) if self._texts[row] else 0
        sequence = self._sequences[row]
        if sequence is None:
            return len(self._texts[row])
        return len(sequence.text) - 1 if sequence.produced_by else sequence.stored

    def _exchange(self, row: int, other: int) -> int:
        """Exchanges what two free rows hold. Returns ``other``."""
        rows, texts = [row, other], [self._texts[row], self._texts[other]]
        self._texts[row] = self._texts[other] = []
        self._copy(rows, rows[::-1], max(map(len, texts)))
        for of_rows in (self._scopes, self._used):
            values: list = of_rows
            values[row], values[other] = values[other], values[row]
        self._texts[other], self._texts[row] = texts
        return other

    def _copy(self, sources: Sequence[int], rows: Sequence[int], count: int) -> None:
        self._cache.copy_rows(sources, rows, count)
        self._parts.take(sources, rows, count)
        if self._session is not None:
            self._session.copy_rows(sources, rows, count)

    def _touch(self, *rows: int) -> None:
        self._time += 1
        for row in rows:
            self._used[row] = self._time
