"""The report of a step to the host: one row of integers for each batch row, packed on the device, unpacked here."""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

import torch

from specdec_kernels import SpeculativeStep, TreeStep

from ..drafters.protocol import Drafts, DraftTree
from ..models.tree import Tree


class StepResult(NamedTuple):
    """The result of one step on the device, whose rows have already been advanced by it."""

    drafts: Drafts | DraftTree
    logits: torch.Tensor  # [B, k + 1, V], the target's own logits
    out: SpeculativeStep | TreeStep
    report: torch.Tensor  # [B, n] int64, made by ``pack`` or ``pack_tree``
    reals: int  # how many of its last columns are float64

    def emitted_logits(self, row: int, count: int) -> torch.Tensor:
        """Returns the target's own logits [count, V] at the first ``count`` tokens that a row emitted."""
        logits = self.logits[row : row + 1]
        if isinstance(self.out, TreeStep):
            logits = on_path(logits, self.out.path[row : row + 1])
        return logits[0, :count].clone()


class SequenceReport(NamedTuple):
    """What one step did for one sequence."""

    tokens: list[int]  # the emitted tokens, up to an end-of-sequence token
    nodes: int  # the drafts that counted
    drafted: int  # the same, but of a tree only the nodes of its longest path
    tested: int  # the accepted drafts, and the one or the siblings that were rejected
    num_accepted: int  # accepted drafts, including those after an end-of-sequence token
    status: int  # Status flags, including those of its drafts
    # [k + 1, w] float64, if the step computed log-probabilities: of each emitted token, under the distribution that it
    # was drawn from and under the softmax of the model's own logits, and then in rows that were scored its ``score``.
    log_probs: torch.Tensor | None
    drafts: list[int] | None = None  # the drafts that counted; None: they were a tree


class RowScores(NamedTuple):
    """The scores of the emitted tokens, for some rows of the batch."""

    rows: torch.Tensor  # [m] int64
    scores: torch.Tensor  # [m, k + 1, w] float64, by ``token_log_probs.score``


class EmittedLogProbs(NamedTuple):
    """Log-probabilities of the emitted tokens."""

    drawn: torch.Tensor  # [B, k + 1], under the distribution that each was drawn from
    raw: torch.Tensor  # [B, k + 1], under the softmax of the model's own logits
    # In its rows it replaces ``raw``, which are not those of the model's own logits if processors changed the logits.
    scored: RowScores | None = None


def pack(
    out: SpeculativeStep,
    drafts: Drafts,
    allowed: torch.Tensor,
    emitted: torch.Tensor,
    scored: RowScores | None = None,
) -> tuple[torch.Tensor, int]:
    """Returns [B, n] int64: three counts and the status, k + 1 tokens, k drafts, the drafts' statuses if any, and the
    bits of log-probabilities if any. Also returns how many columns these take.

    Args:
        allowed: [B] int64, how many of the k drafts counted.
        emitted: [B] int64, how many of ``out.tokens`` each sequence emitted.
        scored: only beside ``out.log_probs``.
    """
    counts = torch.stack((allowed, emitted, out.num_accepted, out.status), 1)
    statuses = () if drafts.status is None else (drafts.status,)
    columns, log_probs = [counts, out.tokens, drafts.tokens, *statuses], None
    if out.log_probs is not None and out.raw_log_probs is not None:
        log_probs = EmittedLogProbs(out.log_probs, out.raw_log_probs, scored)
    return _with_reals(columns, log_probs)


def _with_reals(columns: list[torch.Tensor], log_probs: EmittedLogProbs | None) -> tuple[torch.Tensor, int]:
    if log_probs is None:
        return torch.cat(columns, 1), 0
    reals, scored = torch.stack(log_probs[:2], -1).double(), log_probs.scored
    if scored is not None:
        of_all = reals.new_zeros(*log_probs.raw.shape, scored.scores.shape[2]).index_copy(0, *scored)
        raw = reals[:, :, 1].index_copy(0, scored.rows, scored.scores[:, :, 0])
        reals = torch.cat((reals[:, :, :1], raw[:, :, None], of_all), -1)
    reals = reals.flatten(1)
    return torch.cat((*columns, reals.view(torch.int64)), 1), reals.shape[1]


def unpack(report: torch.Tensor, num_drafts: int, vocab_size: int, reals: int = 0) -> list[SequenceReport]:
    """Returns each row's report from the result of ``pack``, for a step whose drafts had ``num_drafts`` columns. An id
    outside the vocabulary ends the drafts."""
    report, bits = report.split((report.shape[1] - reals, reals), 1)
    log_probs = bits.contiguous().view(torch.float64).view(len(bits), num_drafts + 1, -1) if reals else None
    reports = []
    for i, row in enumerate(report.tolist()):
        (allowed, emitted, num_accepted, status), numbers = row[:4], row[4:]
        tokens, drafts, statuses = (
            numbers[: num_drafts + 1],
            numbers[num_drafts + 1 : 2 * num_drafts + 1],
            numbers[2 * num_drafts + 1 :],
        )
        for draft_status in statuses[:allowed]:
            status |= draft_status
        drafts = list(takewhile(lambda token: 0 <= token < vocab_size, drafts[:allowed]))
        drafted, of_row = len(drafts), None if log_probs is None else log_probs[i]
        tested, counts = min(num_accepted + 1, drafted), (drafted, drafted)
        reports.append(SequenceReport(tokens[:emitted], *counts, tested, num_accepted, status, of_row, drafts))
    return reports


def on_path(rows: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """Returns the rows [B, D + 1, V] that decided the emitted tokens: the root's, and those of accepted nodes.

    Args:
        rows: [B, n + 1, V], of the root and of all nodes.
        path: [B, D + 1] int64, the accepted nodes, then -1. What is returned beyond them says nothing.
    """
    index = torch.nn.functional.pad(path[:, :-1] + 1, (1, 0))
    return rows.gather(1, index[:, :, None].expand(-1, -1, rows.shape[2]))


def pack_tree(
    out: TreeStep,
    drafts: DraftTree,
    tree: Tree,
    counts: torch.Tensor,
    allowed: torch.Tensor,
    emitted: torch.Tensor,
    log_probs: EmittedLogProbs | None = None,
) -> tuple[torch.Tensor, int]:
    """Returns [B, n] int64: five counts and the status, D + 1 tokens, the drafts' statuses if any, and the bits of
    log-probabilities if any. Also returns how many columns these take.

    Args:
        counts: [B, n] bool, the nodes that counted.
        allowed: [B] int64, how many nodes a path may have.
        emitted: [B] int64, how many of ``out.tokens`` each sequence emitted.
    """
    drafted = torch.nn.functional.pad(tree.depths[:, 1:] * counts, (1, 0)).amax(1)
    accepted = out.num_accepted.long()
    last = torch.nn.functional.pad(out.path, (1, 0), value=-1).gather(1, accepted[:, None])
    tested = accepted + ((torch.atleast_2d(drafts.parents) == last) & counts).any(1)
    columns = [torch.stack((counts.sum(1), drafted, tested, emitted, accepted, out.status), 1), out.tokens]
    if drafts.status is not None:
        inner = torch.nn.functional.pad(counts, (1, 0), value=True) & (tree.depths < allowed[:, None])
        columns.append(drafts.status * inner)
    return _with_reals(columns, log_probs)


def unpack_tree(report: torch.Tensor, depth: int, reals: int = 0) -> list[SequenceReport]:
    """Returns each row's report from the result of ``pack_tree``, for a step whose paths had up to ``depth`` nodes."""
    report, bits = report.split((report.shape[1] - reals, reals), 1)
    log_probs = bits.contiguous().view(torch.float64).view(len(bits), depth + 1, -1) if reals else None
    reports = []
    for i, (nodes, drafted, tested, emitted, num_accepted, status, *numbers) in enumerate(report.tolist()):
        for draft_status in numbers[depth + 1 :]:
            status |= draft_status
        of_row = None if log_probs is None else log_probs[i]
        reports.append(SequenceReport(numbers[:emitted], nodes, drafted, tested, num_accepted, status, of_row))
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
        if isinstance(self.result.drafts, DraftTree):
            return unpack_tree(self._copy, self.result.out.tokens.shape[1] - 1, self.result.reals)
        tokens, logits = self.result.drafts.tokens, self.result.logits
        return unpack(self._copy, tokens.shape[1], logits.shape[2], self.result.reals)
