"""The engines of a server: one for each drafter and accept rule that requests ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...checks import shown
from ...prompts import read_eos
from ..engine import Engine
from ..scheduler import Scheduler
from .errors import ApiError, refused


class Lane(NamedTuple):
    """An engine, and what its batches have in common."""

    drafter: str
    rule: str
    engine: Engine
    most_drafts: int  # the largest K
    max_length: int  # the most tokens of prompt and output
    max_eos: int  # the most end-of-sequence tokens of a request
    eos: frozenset[int]  # those of the target
    vocab_size: int  # V of the target
    device: str
    cache_bytes: int


class Lanes:
    """Makes the engine of a drafter and a rule when it is first asked for, because each has caches of its own. All
    share the target.

    Args:
        make: makes an idle scheduler; may take long, and may raise ValueError.
        drafters, rules: the names that requests may ask for; the first of each is the default.
    """

    def __init__(self, make: Callable[[str, str], Scheduler], drafters: Sequence[str], rules: Sequence[str]):
        self.drafters, self.rules = list(drafters), list(rules)
        self._make, self._threads = make, torch.get_num_threads()
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._making = asyncio.Lock()
        self._closed = False

    async def get(self, drafter: str | None = None, rule: str | None = None) -> Lane:
        """Returns the lane of a drafter and a rule; None: the default.

        Raises:
            ApiError: there is no such drafter or rule here, or they do not go together.
        """
        key = (drafter or self.drafters[0], rule or self.rules[0])
        for name, given, allowed in zip(("drafter", "rule"), key, (self.drafters, self.rules), strict=True):
            if given not in allowed:
                raise refused(name, f"got {shown(given[:60])}, allowed: {', '.join(allowed)}")
        async with self._making:
            if self._closed:
                raise ApiError(503, "the server is shutting down", "shutting_down")
            if key not in self._lanes:
                self._lanes[key] = await asyncio.to_thread(self._start, *key)
            return self._lanes[key]

    @property
    def running(self) -> list[Lane]:
        return list(self._lanes.values())

    async def close(self) -> None:
        """Cancels all requests, and ends all engines."""
        async with self._making:
            self._closed = True
            for lane in self._lanes.values():
                await lane.engine.close()

    def _start(self, drafter: str, rule: str) -> Lane:
        torch.set_num_threads(self._threads)  # the engine's thread takes the number of the thread that starts it
        try:
            scheduler = self._make(drafter, rule)
        except ValueError as error:
            raise ApiError(400, str(error), "invalid_value", "drafter") from error
        target, limits = scheduler.target, (scheduler.decoder.most_drafts, scheduler.max_length, scheduler.max_eos)
        of_target = read_eos(None, target.model), target.vocab_size, str(target.device)
        return Lane(drafter, rule, Engine(scheduler), *limits, *of_target, scheduler.budget.bytes)
