"""The host's record of what biases, bans and penalties say of single tokens. It grows with the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from specdec_kernels import SamplingParams, TokenTable
from specdec_kernels.types import PENALTIES, TABLE_PADDING

# Of TokenTable: what stands where there is no token, or a new one.
_EMPTY = {"ids": TABLE_PADDING, "bias": 0.0, "in_prompt": False, "count": 0}
_DTYPES = {"ids": np.int64, "bias": np.float32, "in_prompt": np.bool_, "count": np.int32}
_ROOM = 8  # tokens that a new table can take before it is widened


class HostTable:
    """The ``TokenTable`` of a batch, kept in order while its sequences grow.

    A new token moves the rest of its own row by one place; when a row is full, all become twice as wide. numpy, since
    one small operation of torch costs as much as ten of its.

    Args:
        bias: of every sequence.
        in_prompt: the tokens of every prompt, or none where no penalty asks for them.
        counts: whether a penalty asks for what was generated.
        ends, first_end: as in ``TokenTable``; None: sequences may end at once.
    """

    def __init__(
        self,
        bias: Sequence[Mapping[int, float]],
        in_prompt: Sequence[Sequence[int]],
        counts: bool,
        ends: torch.Tensor | None,
        first_end: torch.Tensor | None,
        device: torch.device,
    ):
        self._counts, self._ends, self._first_end, self._device = counts, ends, first_end, device
        rows = [sorted({*b, *p}) for b, p in zip(bias, in_prompt, strict=True)]
        self._sizes = [len(row) for row in rows]
        shape = len(rows), max(self._sizes, default=0) + _ROOM
        self._columns = {name: np.full(shape, _EMPTY[name], dtype) for name, dtype in _DTYPES.items()}
        for b, row in enumerate(rows):
            self._columns["ids"][b, : len(row)] = row
            self._columns["bias"][b, : len(row)] = [bias[b].get(token, 0.0) for token in row]
            self._columns["in_prompt"][b, : len(row)] = np.isin(row, in_prompt[b])
        self._current: TokenTable | None = None

    @classmethod
    def needed(
        cls,
        prompts: Sequence[Sequence[int]],
        seen: Sequence[Sequence[int]],
        params: SamplingParams,
        bias: Sequence[Mapping[int, float]],
        eos: Sequence[int],
        min_new_tokens: Sequence[int],
        device: torch.device,
    ) -> HostTable | None:
        """None where nothing asks for one. ``seen``: the tokens of each prompt that the repetition penalty counts."""
        counts, delayed = params.uses(PENALTIES), bool(eos) and any(min_new_tokens)
        if not (counts or delayed or any(bias)):
            return None
        in_prompt = seen if params.uses(("repetition_penalty",)) else [()] * len(prompts)
        ends = first_end = None
        if delayed:
            ends = torch.tensor(eos, device=device)
            first_end = [len(p) + n for p, n in zip(prompts, min_new_tokens, strict=True)]
            first_end = torch.tensor(first_end, device=device)
        return cls(bias, in_prompt, counts, ends, first_end, device)

    def add(self, sequence: int, tokens: Sequence[int]) -> None:
        """Counts ``tokens``, which this sequence has emitted."""
        for token in tokens if self._counts else ():
            ids, size = self._columns["ids"][sequence], self._sizes[sequence]
            place = int(np.searchsorted(ids[:size], token))
            if place == size or ids[place] != token:
                self._insert(sequence, place, token)
            self._columns["count"][sequence, place] += 1
            self._current = None

    def _insert(self, sequence: int, place: int, token: int) -> None:
        size = self._sizes[sequence]
        if size == self._columns["ids"].shape[1]:
            for name, column in self._columns.items():
                self._columns[name] = np.concatenate((column, np.full_like(column, _EMPTY[name])), 1)
        for name, column in self._columns.items():
            row = column[sequence]
            row[place + 1 : size + 1] = row[place:size]
            row[place] = _EMPTY[name]
        self._columns["ids"][sequence, place] = token
        self._sizes[sequence] += 1

    def on_device(self) -> TokenTable:
        """For the next step. On a CPU it shares this table's memory: it is valid until the next ``add``."""
        if self._current is None:
            columns = (torch.from_numpy(column).to(self._device) for column in self._columns.values())
            self._current = TokenTable(*columns, self._ends, self._first_end)
        return self._current
