"""What ``generate`` hands back, at the end and after every step."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specdec_kernels import Status

from .stats import Stats


class Producer(enum.StrEnum):
    """Where an emitted token came from."""

    ACCEPTED = "accepted"  # drafted, and passed
    RECOVERED = "recovered"  # drawn from the residual at the first rejection
    BONUS = "bonus"  # drawn from the target after all drafts were accepted, or where nothing was drafted


def error_text(error: BaseException) -> str:
    """What results say of an error."""
    return f"{type(error).__name__}: {error}"


class End(enum.StrEnum):
    """Why a sequence ended."""

    EOS = "eos"  # with an end-of-sequence token
    STOP = "stop"  # with what its ``stop`` says, such as a stop string
    LENGTH = "length"  # it has its ``max_new_tokens``
    CANCELLED = "cancelled"
    FAILED = "failed"  # its logits are no distribution (status says which), or something raised (error says what)


class Emission(NamedTuple):
    """The tokens that one sequence got in one step, as ``on_emit`` receives them."""

    sequence: int
    tokens: list[int]
    produced_by: list[Producer]


@dataclass(frozen=True)
class GenerationResult:
    sequences: torch.Tensor  # [B, prompt + new] int64: the prompt as given, the new tokens, then padding
    tokens: list[list[int]]  # the new tokens of each sequence, an end-of-sequence token included
    produced_by: list[list[Producer]]
    status: list[Status]  # Status.OK, or what went wrong with the sequence's logits
    stats: Stats  # the whole batch
    sequence_stats: list[Stats]
    log_probs: list[list[float]] | None = (
        None  # of ``tokens``, under the distribution they were drawn from; None: not asked
    )
    raw_log_probs: list[list[float]] | None = None  # under softmax of the model's own logits
    logits: list[torch.Tensor] | None = None  # [new, V] of each sequence: the model's own, which decided ``tokens``
    drafter_error: str | None = None  # why the drafter was dropped; None: it was not
    step_costs: list[float] | None = None  # with AdaptiveDrafts: T(0), T(1), ... that K was chosen with
