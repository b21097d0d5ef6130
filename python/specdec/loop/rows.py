"""A batch's rows on the device: the state that a step reads and advances, so that no step waits for the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specdec_kernels import SamplingParams, SamplingTensors, TreeStep, advance_rows, place_rows

from ..drafters.protocol import HostStep, Step
from ..sampling.params import PARAMETERS

if TYPE_CHECKING:
    from specdec_kernels import SpeculativeStep, TokenTable

    from .sequence import SequenceState

PATIENCE = 8  # steps for which fewer rows must suffice before steps have fewer, as each number has costs of its own


def upload(values: list, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns ``values`` as a tensor on ``device``, without waiting for the copy."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Rows:
    """The state of a batch's B rows, in tensors that keep their addresses, as captured steps require. A step has the
    first n rows, and the tensors below are the beginnings of larger ones.

    A row holds one sequence at a time. The host edits rows between steps (``set``, ``clear``). Edits reach the device
    with ``flush``, after the steps that were launched before, so these never see them.

    Attributes:
        count: n.
        greedy: whether all rows have temperature 0.
        known: [n] int64, tokens of the text so far (L); 0 in a row that never had a sequence.
        room: [n] int64, tokens that the sequence may still emit; 0: the row is empty, or its sequence has ended.
        wanted: [n] int64, how many drafts the host wants in the next steps.
        last_two: [n, 2] int64, the last two known tokens (a single known token is there twice).
        ranked: [B] int64, the rows whose emitted tokens are ranked; the step says how many of them count.
        seed: [n] int64.
        sampling: of n rows, without biases and bans; filters, or penalties, that have no effect in any row are None,
            so that nothing is computed for them.
        columns: 0, 1, ..., as many as a tree may have nodes or a chain drafts.
    """

    def __init__(self, size: int, capacity: int, most_drafts: int, nodes: int, max_eos: int, device: torch.device):
        self.size, self.max_eos, self.device = size, max_eos, device
        self._trash = capacity - 1
        # known, room, seed, the last two tokens and the end-of-sequence tokens of each row
        self._integers = torch.zeros(5 + max_eos, size, dtype=torch.int64, device=device)
        self._integers[5:].fill_(-1)
        self._all_wanted, self.ranked = self._integers.new_zeros(2, size)
        off = [0.0 if name == "temperature" else SamplingParams.neutral(name) for name in PARAMETERS]
        parts = torch.tensor(off, device=device).repeat(size, 1).split((1, 3, 3), 1)
        self._numbers = [part.contiguous() for part in parts]  # temperature, filters and penalties
        self._off = dict(zip(PARAMETERS, off, strict=True))
        self._sequences: dict[int, SequenceState] = {}  # of occupied rows
        self.greedy = True
        self.columns = torch.arange(max(most_drafts, nodes) + 1, device=device)
        self._edited: dict[int, SequenceState | None] = {}
        self._wanted, self._ranked = [0] * size, [0] * size
        self.use(size)

    def use(self, count: int) -> None:
        """Sets n, how many rows the next steps have. The others must be empty; no step reads or changes them."""
        self.count, self._state = count, self._integers[:, :count]
        self.known, self.room, self.seed = self._state[:3]
        self.last_two, self.wanted = self._state[3:5].T, self._all_wanted[:count]
        self.sampling = self._used()

    @property
    def key(self) -> tuple:
        """What a captured step fixes of the rows: their number, and which parameters are used."""
        return self.count, *(part is None for part in self.sampling[:3])

    def set(self, row: int, sequence: SequenceState) -> None:
        self._edited[row] = self._sequences[row] = sequence
        self._note_greedy()

    def clear(self, row: int) -> None:
        """Ends the row's sequence."""
        self._edited[row] = None
        self._sequences.pop(row, None)
        self._note_greedy()

    def _note_greedy(self) -> None:
        self.greedy = not any(sequence.params["temperature"] for sequence in self._sequences.values())

    def set_wanted(self, num_drafts: list[int]) -> None:
        """Sets how many drafts each row should have from the next step on."""
        if num_drafts != self._wanted:
            self._all_wanted.copy_(upload(num_drafts, torch.int64, self.device), non_blocking=True)
            self._wanted = num_drafts

    def set_ranked(self, rows: list[int]) -> int:
        """Sets which rows are ranked from the next step on. Returns how many of ``ranked`` count: one row may be there
        several times, since captured steps fix the number, and so only powers of two and ``size`` occur."""
        if not rows:
            return 0
        count = min(1 << (len(rows) - 1).bit_length(), self.size)
        rows = rows + rows[-1:] * (self.size - len(rows))
        if rows != self._ranked:
            self.ranked.copy_(upload(rows, torch.int64, self.device), non_blocking=True)
            self._ranked = rows
        return count

    def flush(self) -> None:
        """Copies the host's edits to the device."""
        if not self._edited:
            return
        integers, numbers = [], []
        for sequence in self._edited.values():
            if sequence is None:
                integers.append([0] * 5 + [-1] * self.max_eos)
                numbers.append(list(self._off.values()))
                continue
            text, eos = sequence.text, [*sequence.eos, *[-1] * (self.max_eos - len(sequence.eos))]
            last_two = [(text[-2:-1] or text)[0], text[-1]]
            integers.append([len(text), sequence.room, sequence.request.seed, *last_two, *eos])
            numbers.append([sequence.params[name] for name in PARAMETERS])
        rows = upload(list(self._edited), torch.int64, self.device)
        self._integers.index_copy_(1, rows, upload(integers, torch.int64, self.device).T)
        parts = upload(numbers, torch.float32, self.device).split((1, 3, 3), 1)
        for mine, part in zip(self._numbers, parts, strict=True):
            mine.index_copy_(0, rows, part)
        self._edited.clear()
        self.sampling = self._used()

    def _used(self) -> SamplingTensors:
        def used(names: tuple[str, ...]) -> bool:
            return any(s.params[name] != self._off[name] for s in self._sequences.values() for name in names)

        temperature, filters, penalties = (part[: self.count] for part in self._numbers)
        return SamplingTensors(
            temperature[:, 0],
            filters if used(SamplingParams.FILTERS) and not self.greedy else None,
            penalties if used(SamplingParams.PENALTIES) else None,
        )

    def place(self, host: HostStep, table: TokenTable | None) -> Step:
        """Returns the step with the positions and slots of its tokens.

        Args:
            table: biases, bans and penalties of tokens; None: there are none.
        """
        lengths, positions, slots, allowed, live = place_rows(
            self.known, self.room, self.wanted, num_drafts=host.num_drafts, trash=self._trash
        )
        return Step(
            index=host.index,
            num_drafts=host.num_drafts,
            visible=host.visible,
            allowed=host.allowed,
            texts=host.texts,
            seen=host.seen,
            greedy=host.greedy,
            fixed_shape=host.fixed_shape,
            log_probs=host.log_probs,
            num_ranked=host.num_ranked,
            top=host.top,
            cut=host.cut,
            share=host.share,
            lengths=lengths,
            position=self.known,
            last_two=self.last_two,
            positions=positions,
            slots=slots,
            allowed_on_device=allowed,
            live=live,
            seed=self.seed,
            sampling=self.sampling if table is None else SamplingTensors(*self.sampling[:3], *table),
        )

    def advance(self, out: SpeculativeStep | TreeStep) -> torch.Tensor:
        """Advances the rows by a step's emitted tokens, up to an end-of-sequence token.

        Returns:
            [n] int64: how many tokens of ``out.tokens`` each sequence emitted; 0 in rows without a live sequence.
        """
        return advance_rows(self._state, out.tokens, out.num_emitted, out.status)


class RowBuckets:
    """How many rows the steps of a batch have: those in use, and few others, so that a step costs what its load does.
    There are few values, since each one is a shape of its own.

    Args:
        size: of the batch, the largest value.
        factor: between one value and the next.
    """

    def __init__(self, size: int, factor: int = 2):
        powers = [1]
        while powers[-1] * factor < size:
            powers.append(powers[-1] * factor)
        self._sizes = sorted({*powers, size})
        self._current, self._spare = 1, 0

    def next(self, used: int) -> int:
        """Returns how many rows the next step has: at least ``used`` >= 1, and not less than before unless less has
        sufficed for a while."""
        enough = next(n for n in self._sizes if n >= used)
        self._spare = self._spare + 1 if enough < self._current else 0
        if enough > self._current or self._spare > PATIENCE:
            self._current, self._spare = enough, 0
        return self._current
