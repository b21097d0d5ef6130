"""Reads prompts into a cache: what a forward is fed, and how many tokens: fewer, once memory has run out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ...checks import read_count
from ..cache.kv_cache import StaticKVCache, visible_slots
from ..machine.free_memory import is_out_of_memory
from .forwards import Forwards
from .layout import Layout

T = TypeVar("T")
# Called for a sequence, by its index, with the position of the first fed token and the logits [n, V] after each.
OnLogits = Callable[[int, int, torch.Tensor], None]
PREFILL_TOKENS = 8192  # most tokens of one prefill forward; its intermediate results are freed before the next one
LOGITS_TOKENS = 1024  # most tokens of one prefill forward whose logits are asked for


class PrefillChunk:
    """How many tokens a prefill forward is fed. Halved when memory runs out, and never increased again, because memory
    would run out again and each failure costs a forward.

    Args:
        size: the initial number of tokens, >= 1.
    """

    def __init__(self, size: int):
        self.size = read_count("prefill_chunk", size, 1)

    def run(self, feed: Callable[[int], T], columns: int, rows: int = 1) -> T:
        """Returns ``feed(n)`` for the largest n <= ``columns`` that ``size`` allows, halved each time memory runs out.
        ``feed`` may fail anywhere; a repeated call must write to the same places.

        Warns (RuntimeWarning) once a call with the old and the new ``size`` if it was halved.

        Args:
            columns: the columns that are left to feed, >= 1.
            rows: tokens of a column, which cannot be divided.

        Raises:
            Exception: any other error of ``feed``, or that memory ran out for a single column.
        """
        columns = before = max(min(self.size // rows, columns), 1)
        try:
            while (result := _tried(feed, columns)) is None:
                columns //= 2
                self.size = columns * rows
            return result[0]
        finally:
            if columns < before:
                told = f"{columns * rows} tokens a forward instead of {before * rows} from now on"
                warnings.warn(f"out of memory in prefill: {told}", RuntimeWarning, stacklevel=2)


def _tried(feed: Callable[[int], T], columns: int) -> tuple[T] | None:
    """Returns ``(feed(columns),)``, or None if memory ran out. The error is caught here and not in the caller, so that
    no traceback keeps the forward's tensors alive while the next one runs."""
    try:
        return (feed(columns),)
    except Exception as error:
        if columns == 1 or not is_out_of_memory(error):
            raise
        return None


class Reading:
    """Texts on their way into a cache: the tokens that are not stored yet, in chunks of columns.

    Args:
        forwards: of the model that reads.
        cache, sequences, starts, first_row, on_logits: as in ``CachedModel.extend``.
    """

    def __init__(
        self,
        forwards: Forwards,
        cache: StaticKVCache,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        first_row: int = 0,
        on_logits: OnLogits | None = None,
    ):
        self._forwards, self._cache, self._sequences = forwards, cache, sequences
        self._first_row, self._on_logits, self._size = first_row, on_logits, len(sequences)
        if any(starts):  # a state cannot go back behind what it contains: such a text is read from its beginning
            committed = cache.committed()[first_row : first_row + self._size]
            starts = [start if start >= least else 0 for start, least in zip(starts, committed, strict=True)]
        self._begin(starts)
        self._told, self._failed = list(starts), False
        lengths = torch.tensor([len(s) for s in sequences], dtype=torch.int64, device=cache.lengths.device)
        cache.lengths = torch.cat((cache.lengths[:first_row], lengths, cache.lengths[first_row + self._size :]))

    def run(self, chunk: PrefillChunk) -> None:
        """Reads all of them."""
        most = max(LOGITS_TOKENS // max(self._size, 1), 1)
        while (left := max(map(len, self._new), default=0) - self._read) > 0:
            chunk.run(self._feed, left if self._on_logits is None else min(left, most), self._size)

    def _begin(self, starts: Sequence[int]) -> None:
        self._starts, self._read = list(starts), 0  # columns
        self._new = [list(s[start:]) for s, start in zip(self._sequences, starts, strict=True)]

    def _feed(self, columns: int) -> None:
        """Feeds the next columns. If it failed before, in the middle of a forward, it writes the same slots again."""
        if self._failed and self._cache.recurrent:  # some states contain these tokens already
            self._begin([0 if own else start for own, start in zip(self._new, self._starts, strict=True)])
        self._failed = True
        fed = [n[self._read : self._read + columns] for n in self._new]
        positions = [start + self._read for start in self._starts]
        prompts = self._forwards.prompts
        if self._on_logits is None:
            # Without the head, because logits of prompt x vocabulary would be the largest tensor of all.
            self._store(prompts.base_model, fed, positions)
        else:
            self._tell(self._on_logits, fed, positions, self._store(prompts, fed, positions).logits)
        self._failed = False
        self._read += columns

    def _tell(self, on_logits: OnLogits, fed: list[list[int]], positions: list[int], logits: torch.Tensor) -> None:
        for i, own in enumerate(fed):
            known = max(self._told[i] - positions[i], 0)
            if known < len(own):
                on_logits(i, positions[i] + known, logits[i, known : len(own)])
                self._told[i] = positions[i] + len(own)

    def _store(self, module: Callable[..., T], fed: list[list[int]], starts: list[int]) -> T:
        """Feeds ``module`` a chunk of each sequence."""
        cache, device, longest = self._cache, self._cache.lengths.device, max(map(len, fed))
        tokens = torch.tensor([[*f, *[0] * (longest - len(f))] for f in fed], device=device)
        index = torch.arange(longest, device=device)
        valid = index < torch.tensor([len(f) for f in fed], device=device)[:, None]
        places = torch.tensor(starts, device=device)[:, None] + index
        slots = torch.where(valid, places, cache.trash)
        stored = max(start + len(f) for start, f in zip(starts, fed, strict=True) if f)
        positions, visible = places * valid, visible_slots(stored, cache.capacity)
        layout = Layout(positions, slots, visible, self._forwards.attention.mask(positions, visible))
        return self._forwards.run(module, tokens, cache, layout, self._first_row, keep=True)
