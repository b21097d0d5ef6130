"""Decides how large the KV caches are, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from ..checks import read_count, refuse
from .machine.free_memory import size_text

UNCHECKED = 16 << 20  # bytes; free memory is not looked up for smaller caches: that takes longer than to allocate them


@dataclass(frozen=True)
class CacheBudget:
    """The size of the caches for ``rows`` sequences of up to ``max_length`` tokens each, prompt and output."""

    rows: int
    max_length: int
    slot_bytes: int  # of one token of one sequence, over all layers of all caches
    step: int = 1
    nodes: int = 0  # of a tree, which need slots after those of the text
    row_bytes: int = 0  # of one sequence, however long: the states of recurrent layers

    @property
    def capacity(self) -> int:
        """Slots of a row: ``max_length``, ``nodes`` and the trash slot, rounded up to a multiple of ``step``."""
        return -(-(self.max_length + self.nodes + 1) // self.step) * self.step

    @property
    def slots(self) -> int:
        return self.rows * self.capacity

    @property
    def bytes(self) -> int:
        return self.slots * self.slot_bytes + self.rows * self.row_bytes

    @property
    def tokens(self) -> int:
        """The tokens that the caches can hold, and sequences reserve, at one time."""
        return self.rows * self.max_length


@dataclass(frozen=True)
class _Limits:
    """The budget that the caller gave."""

    cache_tokens: int | None
    cache_bytes: int | None
    slot_bytes: Mapping[str, int]
    row_bytes: int

    @property
    def each(self) -> int:
        return sum(self.slot_bytes.values())

    def rows(self, capacity: int) -> int | None:
        """Returns the most rows of so many slots; None: no limit."""
        bytes_of_row = capacity * self.each + self.row_bytes
        limits = [] if self.cache_tokens is None else [self.cache_tokens // capacity]
        if self.cache_bytes is not None and bytes_of_row > 0:
            limits.append(self.cache_bytes // bytes_of_row)
        return min(limits, default=None)

    def capacity(self, rows: int) -> int | None:
        """Returns the most slots of each of so many rows; None: no limit."""
        limits = [] if self.cache_tokens is None else [self.cache_tokens // rows]
        if self.cache_bytes is not None and self.each > 0:
            limits.append((self.cache_bytes // rows - self.row_bytes) // self.each)
        return min(limits, default=None)

    def check(self, budget: CacheBudget) -> None:
        """Raises ValueError if caches of this size are too large."""
        if self.cache_tokens is not None and budget.slots > self.cache_tokens:
            self.refuse("cache_tokens", budget)
        if self.cache_bytes is not None and budget.bytes > self.cache_bytes:
            self.refuse("cache_bytes", budget)

    def cost(self) -> str:
        found = f"{self.each} bytes a token ({' + '.join(f'{name} {n}' for name, n in self.slot_bytes.items())})"
        return f"{found} and {self.row_bytes} bytes a row" if self.row_bytes else found

    def refuse(self, name: str, budget: CacheBudget) -> NoReturn:
        """Raises ValueError about the argument ``name``, with the smallest value that allows caches of this size."""
        length = f"max_length={budget.max_length} and the trash slot"
        if budget.nodes:
            length = f"max_length={budget.max_length}, {budget.nodes} nodes of a tree and the trash slot"
        if budget.step > 1:
            length += f", in steps of {budget.step}"
        purpose = f"for {budget.rows} rows of {budget.capacity} slots ({length})"
        if name == "cache_tokens":
            refuse(name, self.cache_tokens, f">= {budget.slots} {purpose}")
        assert self.cache_bytes is not None
        least = budget.bytes
        given = f"{self.cache_bytes} ({size_text(self.cache_bytes)})"
        refuse(name, given, f">= {least} ({size_text(least)}) {purpose} at {self.cost()}")


def plan_caches(
    rows: int | None,
    max_length: int | None,
    cache_tokens: int | None = None,
    cache_bytes: int | None = None,
    *,
    slot_bytes: Mapping[str, int],
    positions: Mapping[str, int | None],
    free_memory: Callable[[], int | None],
    step: int = 1,
    nodes: int = 0,
    row_bytes: int = 0,
    beside: Callable[[int, int], int] = lambda rows, slots: 0,
) -> CacheBudget:
    """Returns the largest caches within the budget; nothing is allocated.

    A cache has rows x (max_length + nodes + 1) slots, rounded up to a multiple of ``step`` in each row; one slot of a
    row is the trash slot. If one of ``rows`` and ``max_length`` is None, it becomes as large as the budget allows, and
    ``max_length`` at most the number of the models' positions.

    Args:
        rows: sequences at one time, >= 1; None: computed from ``max_length`` and a budget.
        max_length: tokens of a sequence, prompt and output, >= 1; None: computed from ``rows``.
        cache_tokens: the most slots of all rows together. The prompts and ``max_new_tokens`` of the sequences that
            are decoded at one time stay below it.
        cache_bytes: the most bytes of all caches together.
        slot_bytes: bytes of one token of one sequence, by model: the target, and the draft if it has its own cache.
        positions: the number of positions of each model; None: no limit.
        free_memory: returns how many bytes can be allocated now, or None if that is not known. Not called for caches
            of up to 16 MiB.
        step: a row's slots are a multiple of this.
        nodes: the most nodes of a tree that is verified in one step, >= 0; 0 for chains, whose drafts are within
            ``max_length``.
        row_bytes: bytes of one sequence in all caches that do not depend on its length.
        beside: returns the bytes that forwards over caches of so many rows and slots of a row take beside these. They
            are no part of the budget, but of what has to be free.

    Raises:
        ValueError: names the argument, what was given, and the numbers that are allowed.
    """
    least = {"rows": (rows, 1), "max_length": (max_length, 1), "cache_tokens": (cache_tokens, 2)}
    for name, (value, smallest) in {**least, "cache_bytes": (cache_bytes, 1)}.items():
        if value is not None:
            read_count(name, value, smallest)
    read_count("nodes", nodes)
    limits = _Limits(cache_tokens, cache_bytes, slot_bytes, row_bytes)
    longest, model = min(((n, name) for name, n in positions.items() if n is not None), default=(None, None))
    if max_length is not None and longest is not None and max_length > longest:
        refuse("max_length", max_length, f"<= {longest}, the positions of the {model}")
    if rows is None:
        most = None if max_length is None else limits.rows(CacheBudget(1, max_length, 0, step, nodes).capacity)
        if most is None:
            refuse("rows", None, "an integer >= 1; or max_length and one of cache_tokens and cache_bytes")
        rows = max(most, 1)
    if max_length is None:
        most = limits.capacity(rows)
        fitting = [] if most is None else [max(most // step * step - nodes - 1, 1)]
        fitting += [] if longest is None else [longest]
        if not fitting:
            refuse("max_length", None, "an integer >= 1, or a budget: these models have no limit of their own")
        max_length = min(fitting)
    budget = CacheBudget(rows, max_length, limits.each, step, nodes, row_bytes)
    limits.check(budget)
    free = free_memory() if budget.bytes > UNCHECKED else None
    more = 0 if free is None else beside(rows, budget.capacity)
    if free is not None and budget.bytes + more > free:
        given = f"{size_text(budget.bytes)} ({rows} rows of {budget.capacity} slots at {limits.cost()})"
        given += f" and {size_text(more)} beside them" if more else ""
        refuse("cache", given, f"<= {size_text(free)}, what is free now")
    return budget
