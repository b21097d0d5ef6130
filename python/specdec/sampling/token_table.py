"""The host's table of the tokens that biases, bans and penalties apply to. It grows with the text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from specdec_kernels import SamplingParams, TokenTable

# The fields of TokenTable, with the value that a place without a token, or with a new one, starts with.
_EMPTY = {"ids": SamplingParams.TABLE_PADDING, "bias": 0.0, "in_prompt": False, "count": 0}
_DTYPES = {"ids": np.int64, "bias": np.float32, "in_prompt": np.bool_, "count": np.int32}
_ROOM = 8  # tokens that a new table can take before it is widened


class HostTable:
    """The ``TokenTable`` of a batch's rows, kept sorted by token while their sequences grow.

    A new token shifts the rest of its own row by one place; when a row is full, all rows become twice as wide. It
    uses numpy, because one small operation of torch costs as much as ten of numpy's.

    Args:
        size: the number of rows.
        max_ends: the largest number of end-of-sequence tokens of one sequence.
    """

    def __init__(self, size: int, max_ends: int, device: torch.device):
        self._device = device
        self._ends = np.full((size, max_ends), -1, np.int64)
        self._first_end = np.zeros(size, np.int64)
        self._sizes, self._counts = [0] * size, [False] * size
        self._columns: dict[str, np.ndarray] = {
            name: np.full((size, _ROOM), _EMPTY[name], dtype) for name, dtype in _DTYPES.items()
        }
        self._needed: set[int] = set()
        self._current: TokenTable | None = None

    def begin(
        self,
        row: int,
        params: Mapping[str, float],
        bias: Mapping[int, float],
        seen: Sequence[int],
        prompt_length: int,
        ends: Collection[int],
        min_new_tokens: int,
    ) -> None:
        """Starts a new sequence in ``row``.

        Args:
            params: all of its ``SamplingParams``, by name.
            seen: the tokens of its prompt that the repetition penalty counts.
            ends: its end-of-sequence tokens, which ``min_new_tokens`` holds back.
        """
        self.end(row)
        penalised = [name for name in SamplingParams.PENALTIES if params[name] != SamplingParams.neutral(name)]
        delayed = min_new_tokens > 0 and len(ends) > 0
        if not (penalised or bias or delayed):
            return
        in_prompt = seen if "repetition_penalty" in penalised else ()
        ids = sorted({*bias, *in_prompt})
        while self._columns["ids"].shape[1] < len(ids) + _ROOM:
            self._widen()
        self._columns["ids"][row, : len(ids)] = ids
        self._columns["bias"][row, : len(ids)] = [bias.get(token, 0.0) for token in ids]
        self._columns["in_prompt"][row, : len(ids)] = np.isin(ids, list(in_prompt))
        self._sizes[row], self._counts[row] = len(ids), bool(penalised)
        self._first_end[row] = prompt_length + min_new_tokens if delayed else 0
        self._ends[row, : len(ends)] = sorted(ends)
        self._needed.add(row)
        self._current = None

    def end(self, row: int) -> None:
        """Removes the row's sequence from the table."""
        if row in self._needed:
            for name, column in self._columns.items():
                column[row] = _EMPTY[name]
            self._sizes[row], self._counts[row], self._first_end[row], self._ends[row] = 0, False, 0, -1
            self._needed.remove(row)
            self._current = None

    @property
    def counts(self) -> bool:
        """Whether the table changes with the emitted tokens."""
        return any(self._counts)

    def add(self, sequence: int, tokens: Sequence[int]) -> None:
        """Counts ``tokens``, which the row ``sequence`` has emitted."""
        for token in tokens if self._counts[sequence] else ():
            ids, size = self._columns["ids"][sequence], self._sizes[sequence]
            place = int(np.searchsorted(ids[:size], token))
            if place == size or ids[place] != token:
                self._insert(sequence, place, token)
            self._columns["count"][sequence, place] += 1
            self._current = None

    def _insert(self, sequence: int, place: int, token: int) -> None:
        size = self._sizes[sequence]
        if size == self._columns["ids"].shape[1]:
            self._widen()
        for name, column in self._columns.items():
            row = column[sequence]
            row[place + 1 : size + 1] = row[place:size]
            row[place] = _EMPTY[name]
        self._columns["ids"][sequence, place] = token
        self._sizes[sequence] += 1

    def _widen(self) -> None:
        for name, column in self._columns.items():
            self._columns[name] = np.concatenate((column, np.full_like(column, _EMPTY[name])), 1)

    def on_device(self, rows: int | None = None) -> TokenTable | None:
        """Returns the table of the first ``rows`` rows (None: of all) for the next step; None if no sequence needs one.
        On a CPU it shares memory with this object, so it is valid until the next ``begin``, ``add`` or ``end``."""
        if not self._needed:
            return None
        if self._current is None:
            columns = [self._copied(column) for column in self._columns.values()]
            delayed = bool(self._first_end.any())
            ends = (self._copied(self._ends), self._copied(self._first_end)) if delayed else (None, None)
            self._current = TokenTable(*columns, *ends)
        if rows is None or rows == len(self._sizes):
            return self._current
        return TokenTable._make(column if column is None else column[:rows] for column in self._current)

    def _copied(self, column: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(column)
        if self._device.type != "cuda":
            return tensor.to(self._device)
        return tensor.pin_memory().to(self._device, non_blocking=True)
