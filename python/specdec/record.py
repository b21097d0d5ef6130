"""The account of one sequence: its text, where every token came from, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import torch

from specdec_kernels import Status
from specdec_kernels.types import TARGET_FAULTS

from .result import Producer
from .stats import Stats

# Plain integers: arithmetic on flags is slow.
_TARGET_FAULTS = int(TARGET_FAULTS)
_DRAFT_FAULTS = int(Status.DRAFT_NAN | Status.DRAFT_POSITIVE_INFINITY)


class Stopping(Protocol):
    """Ends sequences for what their text is, beside end-of-sequence tokens (``specdec.stopping``)."""

    def first_end(self, sequence: int, text: list[int], new: int) -> int | None:
        """How many of the last ``new`` >= 1 tokens of ``text`` (prompt and output of ``sequence``) are kept where it
        ends among them, >= 1; None: it goes on. Called once for the tokens of each step, in order."""


@dataclass(frozen=True)
class Ends:
    """What ends a sequence."""

    max_new_tokens: int
    eos: frozenset[int]
    stop: Stopping | None

    def cut(self, sequence: int, text: list[int], new: int) -> int | None:
        """As ``Stopping.first_end``."""
        tokens = text[len(text) - new :]
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.eos), None)
        if self.stop is None or new == 0:
            return end
        if end is not None:
            text = text[: len(text) - new + end]
        stopped = self.stop.first_end(sequence, text, end or new)
        return end if stopped is None else stopped


@dataclass
class SequenceRecord:
    """One sequence of a generation, as the host knows it."""

    number: int
    text: list[int]  # prompt and output
    processed: list[int]  # the same as processors and penalties see it; the same list where nothing differs
    stats: Stats
    prompt_length: int
    produced_by: list[Producer] = field(default_factory=list)
    status: Status = Status.OK
    log_probs: list[float] = field(default_factory=list)
    raw_log_probs: list[float] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    live: bool = True
    drafts: bool = True  # until its drafter fails

    @property
    def tokens(self) -> list[int]:
        """What was emitted."""
        return self.text[self.prompt_length :]

    @property
    def emitted(self) -> int:
        return len(self.text) - self.prompt_length

    def take(
        self, row: list[int], width: int, allowed: int, vocab_size: int, draft_forwards: int, ends: Ends
    ) -> tuple[list[int], int, int]:
        """Enters what a step of ``width`` drafts decided, of which ``allowed`` count for this sequence.

        Args:
            row: tokens (width + 1), drafts (width), accepted, status, and the drafts' statuses (width) if there are.

        Returns:
            The emitted tokens, and how many drafts were tested and accepted.
        """
        accepted, status = row[2 * width + 1], row[2 * width + 2]
        drafts = row[width + 1 : width + 1 + allowed]
        drafted = sum(1 for _ in takewhile(lambda token: 0 <= token < vocab_size, drafts))
        for draft_status in row[2 * width + 3 : 2 * width + 3 + allowed]:
            status |= draft_status
        tokens = row[:accepted]
        producers = [Producer.ACCEPTED] * accepted
        failed = status & _TARGET_FAULTS != 0
        tested = accepted if failed else min(accepted + 1, drafted)
        if not failed:
            tokens.append(row[accepted])
            producers.append(Producer.RECOVERED if accepted < drafted else Producer.BONUS)
        self.text += tokens
        end = ends.cut(self.number, self.text, len(tokens))
        if end is not None:
            del self.text[len(self.text) - len(tokens) + end :]
            tokens, producers = tokens[:end], producers[:end]
            accepted, tested = min(accepted, end), min(tested, end)
            status &= ~_TARGET_FAULTS  # of a row behind the end
        if self.processed is not self.text:
            self.processed += tokens
        self.produced_by += producers
        if status:
            self.status |= Status(status)
        self.stats.record(drafted, tested, accepted, len(tokens), draft_forwards)
        self.live = not failed and end is None and self.emitted < ends.max_new_tokens
        return tokens, tested, accepted

    def drafter_failed(self) -> bool:
        """Whether it drafted from what is no distribution. All -inf is none either, but comes of bans as well."""
        return int(self.status) & _DRAFT_FAULTS != 0
