"""What a step hands to the host, and its way there."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specdec_kernels import SpeculativeStep

from ..drafters.protocol import Drafts
from .sequence import SequenceRecord


class Wanted(NamedTuple):
    """What is to be reported beside the tokens."""

    log_probs: bool = False
    logits: bool = False


class Decided(NamedTuple):
    """One step on the device; what it decided is entered in the rows' state."""

    drafts: Drafts
    logits: torch.Tensor  # [B, k + 1, V], the target's own
    out: SpeculativeStep
    processed: bool  # whether processors changed what was decided on
    report: torch.Tensor  # [B, n] int64, what SequenceRecord.take reads


class Launched(NamedTuple):
    """A step that the host has not read yet."""

    records: list[SequenceRecord | None]  # of the rows when it was launched
    decided: Decided
    report: torch.Tensor  # on the host, once the event has happened
    event: torch.cuda.Event | None


def launched(records: list[SequenceRecord | None], decided: Decided) -> Launched:
    """Its report on its way."""
    report = decided.report
    if report.device.type != "cuda":
        return Launched(records, decided, report.clone(), None)  # the next replay of a graph writes into it
    copy = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
    copy.copy_(report, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return Launched(records, decided, copy, event)


def log_probs(decided: Decided) -> list[list[list[float]]]:
    """[2, B, k + 1]: of the emitted tokens, under the distribution that was drawn from, and under softmax of the
    model's own logits."""
    out = decided.out
    raw = out.raw_log_probs
    if decided.processed:  # the step saw others than the model's own
        own = decided.logits.float().log_softmax(-1)
        raw = own.gather(2, out.tokens.clamp(min=0)[:, :, None])[:, :, 0]
    return torch.stack((out.log_probs, raw)).tolist()
