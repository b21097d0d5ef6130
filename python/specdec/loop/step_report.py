"""What a step decided, on its way to the host: one row of integers for each sequence, packed and unpacked here."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specdec_kernels import SpeculativeStep

from ..drafters.protocol import Drafts


class StepResult(NamedTuple):
    """One step on the device. What it decided is entered in the device's rows already."""

    drafts: Drafts
    logits: torch.Tensor  # [B, k + 1, V], the target's own
    out: SpeculativeStep
    processed: bool  # whether processors changed the logits that were decided on
    report: torch.Tensor  # [B, n] int64, as ``pack`` makes it


class SequenceReport(NamedTuple):
    """What one step did for one sequence."""

    tokens: list[int]  # emitted, up to an end-of-sequence token
    drafts: list[int]  # that counted
    num_accepted: int  # of the drafts, those after an end-of-sequence token included
    status: int  # Status, those of its drafts included


def pack(out: SpeculativeStep, drafts: Drafts, allowed: torch.Tensor, emitted: torch.Tensor) -> torch.Tensor:
    """[B, n] int64: four counts, k + 1 tokens, k drafts, and the drafts' statuses if there are any.

    Args:
        allowed: [B] int64, how many of the k drafts counted.
        emitted: [B] int64, how many of ``out.tokens`` each sequence got.
    """
    counts = torch.stack((allowed, emitted, out.num_accepted, out.status), 1)
    statuses = () if drafts.status is None else (drafts.status,)
    return torch.cat((counts, out.tokens, drafts.tokens, *statuses), 1)


def unpack(report: torch.Tensor, num_drafts: int) -> list[SequenceReport]:
    """What ``pack`` made of a step whose drafts had ``num_drafts`` columns, for each row."""
    reports = []
    for (allowed, emitted, num_accepted, status), numbers in ((row[:4], row[4:]) for row in report.tolist()):
        tokens, drafts, statuses = (
            numbers[: num_drafts + 1],
            numbers[num_drafts + 1 : 2 * num_drafts + 1],
            numbers[2 * num_drafts + 1 :],
        )
        for draft_status in statuses[:allowed]:
            status |= draft_status
        reports.append(SequenceReport(tokens[:emitted], drafts[:allowed], num_accepted, status))
    return reports


class PendingReport:
    """The report of a step that the host has not read yet, copied without a wait."""

    def __init__(self, result: StepResult):
        self.result, report = result, result.report
        self._event: torch.cuda.Event | None = None
        if report.device.type != "cuda":
            self._copy = report.clone()  # the next replay of a graph writes into it
            return
        self._copy = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
        self._copy.copy_(report, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def read(self) -> list[SequenceReport]:
        """Waits for the step to have ended."""
        if self._event is not None:
            self._event.synchronize()
        return unpack(self._copy, self.result.drafts.tokens.shape[1])


def log_probs(result: StepResult) -> tuple[list[list[float]], list[list[float]]]:
    """[B, k + 1] twice: of the emitted tokens, under the distribution that they were drawn from, and under softmax of
    the model's own logits."""
    out = result.out
    raw = out.raw_log_probs
    if result.processed:  # the operation saw other logits than the model's own
        own = result.logits.float().log_softmax(-1)
        raw = own.gather(2, out.tokens.clamp(min=0)[:, :, None])[:, :, 0]
    assert out.log_probs is not None and raw is not None, "the step was not asked for log-probabilities"
    processed, own_logits = torch.stack((out.log_probs, raw)).tolist()
    return processed, own_logits
