"""The report of a step to the host: one row of integers for each batch row, packed on the device, unpacked here."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specdec_kernels import SpeculativeStep

from ..drafters.protocol import Drafts


class StepResult(NamedTuple):
    """The result of one step on the device, whose rows have already been advanced by it."""

    drafts: Drafts
    logits: torch.Tensor  # [B, k + 1, V], the target's own logits
    out: SpeculativeStep
    processed: bool  # whether verification read logits changed by processors instead
    report: torch.Tensor  # [B, n] int64, made by ``pack``


class SequenceReport(NamedTuple):
    """What one step did for one sequence."""

    tokens: list[int]  # the emitted tokens, up to an end-of-sequence token
    drafts: list[int]  # the drafts that counted
    num_accepted: int  # accepted drafts, including those after an end-of-sequence token
    status: int  # Status flags, including those of its drafts


def pack(out: SpeculativeStep, drafts: Drafts, allowed: torch.Tensor, emitted: torch.Tensor) -> torch.Tensor:
    """Returns [B, n] int64: three counts and the status, k + 1 tokens, k drafts, and the drafts' statuses if any.

    Args:
        allowed: [B] int64, how many of the k drafts counted.
        emitted: [B] int64, how many of ``out.tokens`` each sequence emitted.
    """
    counts = torch.stack((allowed, emitted, out.num_accepted, out.status), 1)
    statuses = () if drafts.status is None else (drafts.status,)
    return torch.cat((counts, out.tokens, drafts.tokens, *statuses), 1)


def unpack(report: torch.Tensor, num_drafts: int) -> list[SequenceReport]:
    """Returns each row's report from the result of ``pack``, for a step whose drafts had ``num_drafts`` columns."""
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
    """The report of a step that the host has not read yet. Its copy to the host does not wait for the step."""

    def __init__(self, result: StepResult):
        self.result, report = result, result.report
        self._event: torch.cuda.Event | None = None
        if report.device.type != "cuda":
            self._copy = report.clone()  # because the next replay of a graph overwrites ``report``
            return
        self._copy = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
        self._copy.copy_(report, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def read(self) -> list[SequenceReport]:
        """Waits for the end of the step, and returns the report of each row."""
        if self._event is not None:
            self._event.synchronize()
        return unpack(self._copy, self.result.drafts.tokens.shape[1])


def log_probs(result: StepResult) -> tuple[list[list[float]], list[list[float]]]:
    """Returns the log-probabilities of the emitted tokens, [B, k + 1] each: under the distribution that they were drawn
    from, and under the softmax of the model's own logits."""
    out = result.out
    raw = out.raw_log_probs
    if result.processed:  # then ``out`` was computed from other logits than the model's own
        own = result.logits.float().log_softmax(-1)
        raw = own.gather(2, out.tokens.clamp(min=0)[:, :, None])[:, :, 0]
    assert out.log_probs is not None and raw is not None, "the step was not asked for log-probabilities"
    processed, own_logits = torch.stack((out.log_probs, raw)).tolist()
    return processed, own_logits
