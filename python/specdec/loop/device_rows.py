"""A batch's rows on the device: the state that a step reads and advances, so that no step waits for the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from specdec_kernels import SamplingParams, SpeculativeStep, Status, TokenTable, TreeStep

from ..drafters.protocol import Step

PARAMETERS = ("temperature", *SamplingParams.FILTERS, *SamplingParams.PENALTIES)
_TARGET_FAULTS = int(Status.TARGET_FAULTS)


class RowStart(NamedTuple):
    """The initial state of a row's sequence."""

    text: list[int]  # its prompt
    room: int  # the most tokens that it may emit, >= 0
    seed: int
    eos: frozenset[int]
    params: Mapping[str, float]  # a value for every name in PARAMETERS


class StepPlan(NamedTuple):
    """The host's input to a step. If the device runs ahead of the host, ``allowed`` does not know the rows' room, and
    the texts are empty (``drafters.protocol.Step``)."""

    step: int  # the number of steps before this one
    num_drafts: int  # K, the most tokens that a row may draft
    steady: bool  # whether K columns are verified even if fewer were drafted
    visible: int  # slots that attention reads
    allowed: list[int]  # how many of the K drafts count for each row, as far as the host knows
    table: TokenTable | None
    texts: list[list[int]]
    processed: list[list[int]]
    log_probs: bool = False  # whether to compute the log-probabilities of the emitted tokens
    num_scored: int = 0  # how many of ``DeviceRows.scored`` count
    top: int = 0  # how many most likely tokens are found in these rows


def upload(values: list, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns ``values`` as a tensor on ``device``, without waiting for the copy."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class DeviceRows:
    """The state of a batch's B rows, in tensors that keep their addresses, as captured steps require. A step has the
    first n rows, and the tensors below are the beginnings of larger ones.

    A row holds one sequence at a time. The host edits rows between steps (``set``, ``clear``). Edits reach the device
    with ``flush``, after the steps that were launched before, so these never see them.

    Attributes:
        count: n.
        known: [n] int64, tokens of the text so far (L); 0 in a row that never had a sequence.
        room: [n] int64, tokens that the sequence may still emit; 0: the row is empty, or its sequence has ended.
        wanted: [n] int64, how many drafts the host wants in the next steps.
        last_two: [n, 2] int64, the last two known tokens (a single known token is there twice).
        scored: [B] int64, the rows whose emitted tokens are scored; the plan says how many of them count.
        seed: [n] int64.
        params: the kernels' parameters of n rows, packed; filters, or penalties, that have no effect in any row are
            None, so that nothing is computed for them.
    """

    def __init__(self, size: int, capacity: int, most_drafts: int, max_eos: int, device: torch.device):
        self.size, self.max_eos, self.device = size, max_eos, device
        self._trash = capacity - 1
        # known, room, seed, the last two tokens and the end-of-sequence tokens of each row
        self._integers = torch.zeros(5 + max_eos, size, dtype=torch.int64, device=device)
        self._integers[5:].fill_(-1)
        self._all_wanted, self.scored = self._integers.new_zeros(2, size)
        off = [0.0 if name == "temperature" else SamplingParams.neutral(name) for name in PARAMETERS]
        parts = torch.tensor(off, device=device).repeat(size, 1).split((1, 3, 3), 1)
        self._numbers = [part.contiguous() for part in parts]  # temperature, filters and penalties
        self._off = dict(zip(PARAMETERS, off, strict=True))
        self._in_rows: dict[int, Mapping[str, float]] = {}  # the parameters of occupied rows
        self._columns = torch.arange(-2, most_drafts, device=device)
        self._edits: dict[int, RowStart | None] = {}
        self._wanted, self._scored = [0] * size, [0] * size
        self.use(size)

    def use(self, count: int) -> None:
        """Sets n, how many rows the next steps have. The others must be empty; no step reads or changes them."""
        self.count, integers = count, self._integers[:, :count]
        self.known, self.room, self.seed = integers[:3]
        self._last_two, self._eos = integers[3:5], integers[5:]
        self.last_two, self.wanted = self._last_two.T, self._all_wanted[:count]
        self.params = self._used_params()

    @property
    def greedy(self) -> bool:
        """Temperature 0 in all rows."""
        return not any(params["temperature"] for params in self._in_rows.values())

    @property
    def signature(self) -> tuple:
        """What a captured step fixes: the number of rows, which parameters are used, and ``greedy``."""
        return self.count, tuple(getattr(self.params, name) is not None for name in PARAMETERS), self.greedy

    def set(self, row: int, settings: RowStart) -> None:
        self._edits[row], self._in_rows[row] = settings, settings.params

    def clear(self, row: int) -> None:
        """Ends the row's sequence."""
        self._edits[row] = None
        self._in_rows.pop(row, None)

    def set_wanted(self, num_drafts: list[int]) -> None:
        """Sets how many drafts each row should have from the next step on."""
        if num_drafts != self._wanted:
            self._all_wanted.copy_(upload(num_drafts, torch.int64, self.device), non_blocking=True)
            self._wanted = num_drafts

    def set_scored(self, rows: list[int]) -> int:
        """Sets which rows are scored from the next step on. Returns how many of ``scored`` count: one row may be there
        several times, since captured steps fix the number, and so only powers of two and ``size`` occur."""
        if not rows:
            return 0
        count = min(1 << (len(rows) - 1).bit_length(), self.size)
        rows = rows + rows[-1:] * (self.size - len(rows))
        if rows != self._scored:
            self.scored.copy_(upload(rows, torch.int64, self.device), non_blocking=True)
            self._scored = rows
        return count

    def flush(self) -> None:
        """Copies the host's edits to the device."""
        if not self._edits:
            return
        integers, numbers = [], []
        for settings in self._edits.values():
            if settings is None:
                integers.append([0] * 5 + [-1] * self.max_eos)
                numbers.append(list(self._off.values()))
                continue
            text, eos = settings.text, [*settings.eos, *[-1] * (self.max_eos - len(settings.eos))]
            integers.append([len(text), settings.room, settings.seed, (text[-2:-1] or text)[0], text[-1], *eos])
            numbers.append([settings.params[name] for name in PARAMETERS])
        rows = upload(list(self._edits), torch.int64, self.device)
        self._integers.index_copy_(1, rows, upload(integers, torch.int64, self.device).T)
        parts = upload(numbers, torch.float32, self.device).split((1, 3, 3), 1)
        for mine, part in zip(self._numbers, parts, strict=True):
            mine.index_copy_(0, rows, part)
        self._edits.clear()
        self.params = self._used_params()

    def _used_params(self) -> SamplingParams:
        def used(names: tuple[str, ...]) -> bool:
            return any(params[name] != self._off[name] for params in self._in_rows.values() for name in names)

        temperature, *others = (part[: self.count] for part in self._numbers)
        filters = others[0] if used(SamplingParams.FILTERS) and not self.greedy else None
        penalties = others[1] if used(SamplingParams.PENALTIES) else None
        return SamplingParams.packed(temperature[:, 0], filters, penalties)

    def place(self, plan: StepPlan, wanted: torch.Tensor | None = None) -> Step:
        """Returns the step with the positions and slots of its tokens. A sequence drafts at most ``room - 1`` tokens,
        since a step adds one recovered or bonus token to them. Tokens that do not count get position 0 and the trash
        slot.

        Args:
            wanted: [n] int64, the drafts of each row, in place of those of ``set_wanted``.
        """
        columns = self._columns[: plan.num_drafts + 2]
        live = self.room > 0
        allowed = torch.minimum(self.wanted if wanted is None else wanted, self.room - 1).clamp_(0, plan.num_drafts)
        places = self.known[:, None] + columns
        counts = (columns < allowed[:, None]) & (places >= 0) & live[:, None]
        return Step(
            index=plan.step,
            num_drafts=plan.num_drafts,
            lengths=(self.known - 1).clamp_(0),
            position=self.known,
            last_two=self.last_two,
            positions=places * counts,
            slots=torch.where(counts, places, self._trash),
            visible=plan.visible,
            allowed=plan.allowed,
            allowed_on_device=allowed,
            table=plan.table,
            texts=plan.texts,
            processed=plan.processed,
        )

    def advance(self, out: SpeculativeStep | TreeStep) -> torch.Tensor:
        """Advances the rows by a step's emitted tokens, up to an end-of-sequence token.

        Returns:
            [n] int64: how many tokens of ``out.tokens`` each sequence emitted; 0 in rows without a live sequence.
        """
        live, tokens = self.room > 0, out.tokens
        count = out.num_emitted.to(torch.int64)
        index = torch.arange(tokens.shape[1], device=self.device)
        ends = (tokens[:, :, None] == self._eos.T[:, None]).any(-1) & (index < count[:, None])
        beyond = tokens.shape[1]
        first = torch.where(ends, index, beyond).amin(1)
        ended = first < beyond
        count = torch.minimum(count, first + 1) * live
        failed = (out.status & _TARGET_FAULTS) != 0
        self.room.sub_(count).mul_(~(ended | failed))
        self.known.add_(count)
        known = torch.cat((self.last_two, tokens), 1)
        self._last_two.copy_(known.gather(1, count[:, None] + self._columns[:2] + 2).T)
        return count
