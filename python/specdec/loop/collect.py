"""What a generation returns, from the records of its sequences and the counts of its batch."""

from __future__ import annotations

import torch

from ..result import End, GenerationResult
from ..stats import Stats
from .batch import Batch
from .sequence import SequenceRecord
from .token_log_probs import AskedLogProbs


def collect(
    batch: Batch,
    records: list[SequenceRecord],
    sequences: torch.Tensor,
    asked: AskedLogProbs,
    step_costs: list[float] | None,
) -> GenerationResult:
    """Returns the result of a batch whose sequences have ended. ``sequences`` and ``step_costs`` are part of it."""
    stats = Stats.total((r.stats for r in records), batch.config.most_drafts)
    stats.target_forwards, stats.draft_forwards = batch.steps, batch.draft_forwards
    stats.seconds = batch.stopwatch.with_total()
    of_prompts = [p for r in records if (p := r.prompt_log_probs) is not None]
    return GenerationResult(
        sequences,
        tokens=[r.tokens for r in records],
        produced_by=[r.produced_by for r in records],
        status=[r.status for r in records],
        end=[r.end or End.LENGTH for r in records],  # with no new tokens wanted, none has begun
        stats=stats,
        sequence_stats=[r.stats for r in records],
        log_probs=[r.log_probs for r in records] if asked.emitted else None,
        raw_log_probs=[r.raw_log_probs for r in records] if asked.emitted else None,
        top_log_probs=[r.top_log_probs for r in records] if asked.top is not None else None,
        prompt_log_probs=of_prompts if asked.prompt is not None else None,
        logits=[_stacked(r.logits, batch) for r in records] if batch.config.logits else None,
        drafter_error=None if batch.session is None else batch.session.error,
        step_costs=step_costs,
    )


def _stacked(rows: list[torch.Tensor], batch: Batch) -> torch.Tensor:
    target = batch.config.target
    return torch.stack(rows) if rows else torch.empty(0, target.vocab_size, device=target.device)
