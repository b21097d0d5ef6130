"""What drafters share that find some rows' tokens in texts, and leave the other rows to another drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch

from ..checks import refuse
from ..models.forward.cached_model import CachedModel
from .protocol import BatchState, Copies, Drafter, Drafts, DraftSession, Step, proposed


class BesideDrafter(Drafter):
    """A drafter beside another one, which has whatever models and caches there are. Chains only.

    Args:
        drafter: the other one; None: there is none.
    """

    def __init__(self, drafter: Drafter | None = None):
        self.drafter = drafter
        if drafter is not None:
            self.model, self.max_length, self.doubt = drafter.model, drafter.max_length, drafter.doubt

    @property
    def reads_only_filled(self) -> bool:
        return self.drafter is None or self.drafter.reads_only_filled

    def check(self, target: CachedModel, nodes: int, most_drafts: int) -> None:
        if nodes:
            refuse("tree", f"{nodes} with a {type(self).__name__}", "None")
        if self.drafter is not None:
            self.drafter.check(target, nodes, most_drafts)

    def cache_bytes(self) -> int:
        return 0 if self.drafter is None else self.drafter.cache_bytes()

    def row_bytes(self, most_drafts: int) -> int:
        return 0 if self.drafter is None else self.drafter.row_bytes(most_drafts)


class BesideSession(DraftSession):
    """A session beside another one or none. The other one is not asked in a step in which no row is left to it, and
    reads what it missed before it drafts for a row again."""

    def __init__(self, other: DraftSession | None, batch: BatchState):
        self.other, self.batch = other, batch
        self.behind: dict[int, int] = {}  # rows of which the other session missed tokens -> how many it has seen

    def copy_rows(self, sources: Sequence[int], rows: Sequence[int], count: int) -> None:
        if self.other is not None:
            self.other.copy_rows(sources, rows, count)

    def begin(self, prompts: Mapping[int, list[int]]) -> None:
        for row in prompts:
            self.behind.pop(row, None)
        if self.other is not None:
            self.other.begin(prompts)

    def observe(self, texts: Mapping[int, list[int]], starts: Mapping[int, int]) -> None:
        if self.other is not None and texts:
            self.other.observe(texts, {row: min(start, self.behind.get(row, start)) for row, start in starts.items()})
        for row in texts:
            self.behind.pop(row, None)

    def end(self, row: int, output: list[int]) -> None:
        self.behind.pop(row, None)
        if self.other is not None:
            self.other.end(row, output)

    def release(self) -> None:
        if self.other is not None:
            self.other.release()

    def of_other(self, step: Step, apart: Collection[int]) -> Drafts | Copies | None:
        """Returns the other session's drafts for the rows that are not ``apart``; none for those. None: it was not
        asked, as no row is left to it."""
        if self.other is None:
            return None
        missed = {row: n for row, n in self.behind.items() if step.allowed[row] and row not in apart}
        if missed:
            self.observe({row: step.texts[row] for row in missed}, missed)
        allowed = [0 if row in apart else most for row, most in enumerate(step.allowed)]
        # It sees no other drafts than its own, and needs the last two tokens of a text in its next drafts only.
        for row in apart if any(allowed) else [row for row, text in enumerate(step.texts) if text]:
            self.behind.setdefault(row, max(len(step.texts[row]) - 2, 0))
        if not any(allowed):
            return None
        if apart:
            # A drafter with a state must not be fed a text with a gap.
            away = torch.tensor([row in apart for row in range(len(allowed))], device=step.slots.device)[:, None]
            slots = step.slots.masked_fill(away, self.batch.capacity - 1)
            positions = step.positions.masked_fill(away, 0)
            step = dataclasses.replace(step, allowed=allowed, slots=slots, positions=positions)
        drafts = proposed(self.other, step)
        return drafts._replace(caught_up=True) if missed and isinstance(drafts, Drafts) else drafts


def replaced(drafts: Drafts, proposals: Mapping[int, list[int]]) -> Drafts:
    """Returns the drafts with those of some rows, by their number, replaced by ``proposals``, whose q is one-hot."""
    if not proposals:
        return drafts
    device, columns = drafts.tokens.device, max(drafts.tokens.shape[1], *map(len, proposals.values()))
    drafts, rows = drafts.widened(columns), torch.tensor([*proposals], device=device)
    padded = [[*tokens, *[-1] * (columns - len(tokens))] for tokens in proposals.values()]
    proposed = torch.tensor(padded, dtype=torch.int64, device=device).view(len(padded), columns)
    one_hot, status = drafts.one_hot or [False] * len(drafts.tokens), drafts.status
    return drafts._replace(
        tokens=drafts.tokens.index_copy(0, rows, proposed),
        status=None if status is None else status.index_fill(0, rows, 0),
        one_hot=[before or row in proposals for row, before in enumerate(one_hot)],
    )
