"""How large the caches are, decided before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from ..checks import read_count, refuse
from .free_memory import size_text

UNCHECKED = 16 << 20  # bytes that may be there or not: asking takes longer than to allocate them


@dataclass(frozen=True)
class CacheBudget:
    """Caches of ``rows`` sequences, each of up to ``max_length`` tokens, prompt and output."""

    rows: int
    max_length: int
    slot_bytes: int  # of one token of one sequence, over all layers of all caches
    step: int = 1

    @property
    def capacity(self) -> int:
        """Slots of a row: at least one more, the trash slot, and a multiple of ``step``."""
        return -(-(self.max_length + 1) // self.step) * self.step

    @property
    def slots(self) -> int:
        return self.rows * self.capacity

    @property
    def bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def tokens(self) -> int:
        """That can be promised at one time: what the caches hold."""
        return self.rows * self.max_length


@dataclass(frozen=True)
class _Limits:
    """What the caller gave as a budget."""

    cache_tokens: int | None
    cache_bytes: int | None
    slot_bytes: Mapping[str, int]

    @property
    def each(self) -> int:
        return sum(self.slot_bytes.values())

    def slots(self) -> tuple[int, str] | None:
        """The most that all rows may have together, and the argument that says so; None: any number."""
        limits = []
        if self.cache_tokens is not None:
            limits.append((self.cache_tokens, "cache_tokens"))
        if self.cache_bytes is not None and self.each > 0:
            limits.append((self.cache_bytes // self.each, "cache_bytes"))
        return min(limits, default=None)

    def cost(self) -> str:
        return f"{self.each} bytes a token ({' + '.join(f'{name} {n}' for name, n in self.slot_bytes.items())})"

    def refuse(self, name: str, budget: CacheBudget) -> NoReturn:
        """The argument ``name``, with the least that would do for caches of this size."""
        length = f"max_length={budget.max_length} and the trash slot"
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
) -> CacheBudget:
    """The largest caches within the budget; nothing is allocated.

    A cache is a rectangle: rows x (max_length + 1) slots, or more by ``step``; one in a row is trash. Where one of
    ``rows`` and ``max_length`` is None, it is as large as the budget allows; ``max_length`` at most the models'
    positions.

    Args:
        rows: sequences at one time, >= 1; None: ``max_length`` and a budget say.
        max_length: tokens of a sequence, prompt and output, >= 1.
        cache_tokens: slots of all rows together, at most. What sequences are promised at one time, their prompts and
            ``max_new_tokens``, stays below it.
        cache_bytes: of all caches together, at most.
        slot_bytes: by model, what one token of one sequence takes: the target, and the draft where it has a cache of
            its own.
        positions: by model, how many it has; None: no limit.
        free_memory: says how many bytes can be allocated now; None: it is not known. Caches below 16 MiB do not ask.
        step: a row's slots are a multiple of so many.

    Raises:
        ValueError: names the argument, what was given, and the numbers that are allowed.
    """
    least = {"rows": (rows, 1), "max_length": (max_length, 1), "cache_tokens": (cache_tokens, 2)}
    for name, (value, smallest) in {**least, "cache_bytes": (cache_bytes, 1)}.items():
        if value is not None:
            read_count(name, value, smallest)
    limits = _Limits(cache_tokens, cache_bytes, slot_bytes)
    most = limits.slots()
    longest, model = min(((n, name) for name, n in positions.items() if n is not None), default=(None, None))
    if max_length is not None and longest is not None and max_length > longest:
        refuse("max_length", max_length, f"<= {longest}, the positions of the {model}")
    if rows is None:
        if max_length is None or most is None:
            refuse("rows", None, "an integer >= 1; or max_length and one of cache_tokens and cache_bytes")
        rows = max(most[0] // CacheBudget(1, max_length, 0, step).capacity, 1)
    elif max_length is None:
        fitting = [] if most is None else [max(most[0] // rows // step * step - 1, 1)]
        fitting += [] if longest is None else [longest]
        if not fitting:
            refuse("max_length", None, "an integer >= 1, or a budget: these models have no limit of their own")
        max_length = min(fitting)
    budget = CacheBudget(rows, max_length, limits.each, step)
    if most is not None and budget.slots > most[0]:
        limits.refuse(most[1], budget)
    free = free_memory() if budget.bytes > UNCHECKED else None
    if free is not None and budget.bytes > free:
        given = f"{size_text(budget.bytes)} ({rows} rows of {budget.capacity} slots at {limits.cost()})"
        refuse("cache", given, f"<= {size_text(free)}, what is free now")
    return budget
