"""The report of a step to the host: one tensor of integers, and one of log-probabilities if they were asked for."""

from __future__ import annotations

import time
from itertools import takewhile
from typing import NamedTuple

import torch

from specdec_kernels import SpeculativeStep, Status, TreeStep

from ..drafters.protocol import Drafts, Step
from ..models.cache.tree import Tree
from .log_probs import on_path


class StepResult(NamedTuple):
    """The result of one step on the device, whose rows have already been advanced by it."""

    drafts: Drafts
    logits: torch.Tensor  # [n, k + 1, V], the target's own logits
    out: SpeculativeStep | TreeStep
    report: torch.Tensor  # [n, m] int64, made by ``pack``
    log_probs: torch.Tensor | None  # [n, D + 1, w] float64, as ``RowReport`` has them; None: not asked for

    def emitted_logits(self, row: int, count: int) -> torch.Tensor:
        """Returns the target's own logits [count, V] at the first ``count`` tokens that a row emitted."""
        logits = self.logits[row : row + 1]
        if isinstance(self.out, TreeStep):
            logits = on_path(logits, self.out.path[row : row + 1])
        return logits[0, :count].clone()


class RowReport(NamedTuple):
    """What one step did for one row."""

    tokens: list[int]  # the emitted tokens, up to an end-of-sequence token
    nodes: int  # the drafts that counted
    drafted: int  # the same, but of a tree only the nodes of its longest path
    tested: int  # the accepted drafts, and the one or the siblings that were rejected
    num_accepted: int  # accepted drafts, including those after an end-of-sequence token
    status: int  # Status flags, including those of its drafts
    drafts: list[int] | None  # the drafts that counted; None: they were a tree
    # [D + 1, w] float64: of each emitted token, under the distribution that it was drawn from and under the softmax of
    # the model's own logits, and then in rows that were ranked its ``score``. None: not asked for.
    log_probs: torch.Tensor | None

    def cut(self, count: int) -> RowReport:
        """As if the step had ended after its first ``count`` tokens, which are fewer than it emitted, and drafts. What
        is wrong with later logits does not count."""
        known = self.status & ~int(Status.TARGET_FAULTS)
        return self._replace(tokens=self.tokens[:count], tested=count, num_accepted=count, status=known)


def pack(
    step: Step,
    drafts: Drafts,
    tree: Tree | None,
    counts: torch.Tensor | None,
    out: SpeculativeStep | TreeStep,
    emitted: torch.Tensor,
) -> torch.Tensor:
    """Returns [n, m] int64: the counts of ``RowReport`` and how many tokens were emitted, D + 1 tokens, the drafts of a
    chain, and the drafts' statuses if any.

    Args:
        tree: the shape of ``drafts``; None: they are chains.
        counts: [n, k] bool, the nodes of a tree that counted.
        emitted: [n] int64, how many of ``out.tokens`` each row emitted.
    """
    accepted, allowed, columns = out.num_accepted, step.allowed_on_device, [out.tokens]
    if tree is None:
        # The host counts a chain's drafts itself, which needs no operation on the device.
        nodes = drafted = tested = allowed
        columns.append(drafts.tokens)
        if drafts.status is not None:
            columns.append(drafts.status)
    else:
        assert isinstance(out, TreeStep) and drafts.parents is not None and counts is not None
        nodes, accepted = counts.sum(1), accepted.long()
        drafted = torch.nn.functional.pad(tree.depths[:, 1:] * counts, (1, 0)).amax(1)
        last = torch.nn.functional.pad(out.path, (1, 0), value=-1).gather(1, accepted[:, None])
        tested = accepted + ((torch.atleast_2d(drafts.parents) == last) & counts).any(1)
        if drafts.status is not None:
            inner = torch.nn.functional.pad(counts, (1, 0), value=True) & (tree.depths < allowed[:, None])
            columns.append(drafts.status * inner)
    return torch.cat((torch.stack((nodes, drafted, tested, emitted, accepted, out.status), 1), *columns), 1)


class PendingReport:
    """The report of a step that the host has not read yet. Its copy to the host does not wait for the step."""

    def __init__(self, result: StepResult):
        self.result = result
        self._copies = [None if t is None else _copy_to_host(t) for t in (result.report, result.log_probs)]
        self._event: torch.cuda.Event | None = None
        if result.report.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[RowReport]:
        """Waits for the end of the step, and returns the report of each row."""
        if self._event is not None:
            self._event.synchronize()
        integers, log_probs = self._copies
        assert integers is not None
        (drafts, logits, out, *_), reports = self.result, []
        width, columns = out.tokens.shape[1], drafts.tokens.shape[1]
        for i, (nodes, drafted, tested, emitted, accepted, status, *numbers) in enumerate(integers.tolist()):
            chain, statuses = None, numbers[width:]
            if drafts.parents is None:
                allowed = min(nodes, columns)
                # An id outside the vocabulary ends the drafts.
                chain = list(takewhile(lambda token: 0 <= token < logits.shape[2], statuses[:allowed]))
                statuses = statuses[columns : columns + allowed]
                nodes = drafted = len(chain)
                tested = min(accepted + 1, drafted)
            for draft_status in statuses:
                status |= draft_status
            of_row = None if log_probs is None else log_probs[i]
            reports.append(RowReport(numbers[:emitted], nodes, drafted, tested, accepted, status, chain, of_row))
        return reports


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.clone()  # because the next replay of a graph overwrites it
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


class StepTimer:
    """Times a step on the device without waiting for it. It starts when it is made. On a GPU two events enclose the
    step: the host reads them once it has the step's report. On a CPU a step has ended when its call returns."""

    def __init__(self, device: torch.device):
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()
        self._started = self._ended = time.perf_counter()

    def stop(self) -> None:
        if self._events is not None:
            self._events[1].record()
        self._ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The time of a step whose report was read."""
        return (
            self._ended - self._started
            if self._events is None
            else self._events[0].elapsed_time(self._events[1]) * 1e-3
        )
