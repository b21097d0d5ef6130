"""What the host says of the next step: how many rows it has, how many drafts each one, and what attention reads."""

from __future__ import annotations

import functools
from collections.abc import Collection

from specdec_kernels import Rule

from ..drafters.composite import by_match
from ..drafters.guard import GuardedSession
from ..drafters.protocol import BatchState, HostStep
from ..models.cache.kv_cache import visible_slots
from .batch_config import BatchConfig
from .log_probs import MAX_TOP
from .rows import RowBuckets, Rows
from .sequence import SequenceState, decoding


class StepPlanner:
    """Plans the steps of a batch.

    Args:
        sequences: the batch's, by row.

    Attributes:
        varies_rows: whether steps have few more rows than are in use.
    """

    def __init__(
        self,
        config: BatchConfig,
        sequences: list[SequenceState | None],
        state: BatchState,
        rows: Rows,
        session: GuardedSession | None,
    ):
        self.sequences, self._lengths, self._rule = sequences, config.num_drafts, config.rule
        self._state, self._rows, self._session = state, rows, session
        drafter = config.drafter
        self._end = None if drafter is None else drafter.max_length
        self._reads_only_filled = config.target.reads_only_filled and (drafter is None or drafter.reads_only_filled)
        # Where K adapts, steps have few more rows than are in use. On a GPU each number takes kernels and graphs.
        self._buckets: RowBuckets | None = None
        if config.num_drafts.adapts:
            self._buckets = RowBuckets(config.size, 4 if config.graphs is not None else 2)
        self.varies_rows = self._buckets is not None

    @property
    def _free(self) -> bool:
        """Whether K is chosen for each step, and steps may have fewer rows, because no row's text depends on that."""
        depends = (self._rule.rule != Rule.COUPLED or not self._rule.exact) and not self._rows.greedy
        return self._lengths.chooses(depends)

    def count_rows(self) -> int:
        """Returns how many rows the next step has."""
        if self._buckets is None:
            return len(self.sequences)
        return self._buckets.next(max(decoding(self.sequences)) + 1 if self._free else len(self.sequences))

    def wanted_drafts(self) -> tuple[list[int], bool]:
        """Returns how many tokens each row should draft in the next step, and whether that was chosen for this step."""
        caps: dict[int, int] = {}
        live = decoding(self.sequences)
        if self._session is not None and self._session.alive:
            for row, sequence in live.items():
                if sequence.may_draft and (self._end is None or len(sequence.text) <= self._end):
                    most = sequence.request.num_drafts
                    caps[row] = self._lengths.most if most is None else most
        if not caps:
            return [0] * len(self.sequences), False
        k, free = self._lengths.fixed, self._free
        if free:
            k = self._lengths.choose(self._rows.count, len(live), list(caps.values()))
        return [min(k, caps.get(row, 0)) for row in range(len(self.sequences))], free

    def room_for_drafts(self, sequence: SequenceState) -> int:
        """Returns how many drafts of a sequence count at most: one less than it may still emit, and as far as the
        drafter's positions go, of which the last one gives a draft after it."""
        room = max(sequence.room - 1, 0)
        return room if self._end is None else max(min(room, self._end + 1 - len(sequence.text)), 0)

    def host_step(
        self, index: int, wanted: list[int], *, chosen: bool, host_knows: bool, fixed_shape: bool, unread: int
    ) -> HostStep:
        """Returns the host's part of a step in which each row drafts up to ``wanted`` tokens. The device limits that by
        the rows' room. Where the host knows the room, it does so, too, if that saves columns, or keeps processors from
        texts that are too long.

        Args:
            index: the number of steps before this one.
            chosen: whether K was chosen for this step.
            host_knows: whether the host has read all texts, and passes them to the step.
            fixed_shape: whether K columns are verified even if fewer were drafted.
            unread: how many steps before this one the host has not read.
        """
        sequences, allowed = self.sequences[: len(wanted)], wanted
        texts: list[list[int]] = []
        if host_knows:
            if max(wanted) and (not fixed_shape or self._state.processors):
                rooms = (0 if s is None else self.room_for_drafts(s) for s in sequences)
                allowed = [min(n, room) for n, room in zip(wanted, rooms, strict=True)]
            texts = [[] if s is None else s.text for s in sequences]
        num_drafts = max(wanted if fixed_shape else allowed)
        live = decoding(self.sequences).values()
        asked = {row: s.request.top_log_probs for row, s in enumerate(sequences) if s and s.log_probs is not None}
        # The kernel's raw log-probabilities are of the logits that it reads, which are those after processors.
        processors = self._state.processors.of_rows
        ranked = [row for row, top in asked.items() if top is not None or processors[row]]
        return HostStep(
            index=index,
            num_drafts=num_drafts,
            visible=self._visible(live, max(num_drafts, self._state.nodes), unread),
            allowed=allowed,
            texts=texts,
            seen=[s.seen if s and s.processors else [] for s in sequences],
            greedy=self._rows.greedy,
            fixed_shape=fixed_shape,
            log_probs=bool(asked),
            num_ranked=self._rows.set_ranked(ranked),
            top=MAX_TOP if any(asked.values()) else 0,  # two values only, because captured steps fix it
            cut=functools.partial(self._lengths.cut, len(wanted), len(live)) if chosen else lambda _: None,
            share=functools.partial(self._lengths.share, len(wanted), len(live)) if chosen else by_match,
        )

    def _visible(self, live: Collection[SequenceState], num_drafts: int, unread: int) -> int:
        """Returns the slots that attention reads: those of the longest sequence, and those that steps without a report
        may have added."""
        if self._reads_only_filled:
            return self._state.capacity
        longest = max(len(s.text) for s in live)
        return visible_slots(longest + unread * (self._lengths.most + 1) + num_drafts, self._state.capacity)
