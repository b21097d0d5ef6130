"""The memory of a batch: what the caches of target and drafter take, and how many rows fit."""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import dataclass

from ..drafters.protocol import Drafter
from ..models.cache_plan import CacheBudget, plan_caches
from ..models.forward.cached_model import CachedModel


@dataclass(frozen=True)
class BatchMemory:
    """What the caches of a batch take, for up to K drafts and trees of N nodes (0: chains)."""

    target: CachedModel
    drafter: Drafter | None
    most_drafts: int
    nodes: int

    @property
    def tree_slots(self) -> int:
        """How many slots after a text the caches need for a tree: a drafter may look at more nodes than it proposes."""
        if not self.nodes or self.drafter is None:
            return 0
        return max(self.nodes, self.drafter.tree_slots(self.nodes, self.most_drafts))

    def plan(
        self, rows: int | None, max_length: int | None, cache_tokens: int | None, cache_bytes: int | None, step: int
    ) -> CacheBudget:
        """Plans the caches within a budget and the free memory, without allocating them. The arguments are those of
        ``specdec.models.cache_plan.plan_caches``.

        Raises:
            ValueError: names the argument, what was given, and the numbers that are allowed.
        """
        plan = functools.partial(self._plan, (rows, max_length, cache_tokens, cache_bytes), step)
        end = None if self.drafter is None else self.drafter.max_length
        if end is None:
            return plan()
        slots = end + self.tree_slots + 1
        if max_length is not None:
            capacity = CacheBudget(1, max_length, 0, step, self.tree_slots).capacity
            return plan(slots if capacity > slots else None)
        # Whether texts become longer than the drafter's positions is what the plan says.
        with suppress(ValueError):
            if (budget := plan(slots)).max_length > end:
                return budget
        return plan()

    def _plan(self, asked: tuple[int | None, ...], step: int, draft_slots: int | None = None) -> CacheBudget:
        """The same for these, where a row of the drafter's cache has so many slots; None: as many as one of the
        target's."""
        costs, window = {"target": self.target.slot_bytes()}, max(self.most_drafts, self.nodes) + 1
        row_bytes = self.target.row_bytes(window)
        if self.most_drafts > 0 and self.drafter is not None:
            # A drafter that fails here will also fail when its session starts, and is dropped there.
            with suppress(Exception):
                each = self.drafter.cache_bytes()
                costs["draft"] = each if draft_slots is None else 0
                row_bytes += each * (draft_slots or 0)
                row_bytes += self.drafter.row_bytes(self.most_drafts)
        return plan_caches(
            *asked,
            slot_bytes={name: cost for name, cost in costs.items() if cost},
            positions={"target": self.target.max_length},
            free_memory=self.target.free_memory,
            step=step,
            nodes=self.tree_slots,
            row_bytes=row_bytes,
            beside=functools.partial(self.target.bytes_beside_caches, tokens=window),
        )
