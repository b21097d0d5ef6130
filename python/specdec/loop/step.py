"""One step of speculative decoding, the whole of it on the device.

The draft proposes up to K tokens a row, and the target scores them in one forward over K + 1 positions. One operation
then accepts a prefix of the drafts and adds one token: after a rejection the recovered token, drawn from the residual
max(0, p - q), otherwise the bonus token, drawn from the target (Leviathan et al., arXiv 2211.17192, Algorithm 1; Chen
et al., arXiv 2302.01318, Algorithm 2). A step continues from the state in which the previous step left the rows.
Nothing in it waits for the host, so it can be replayed as a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec_kernels import speculative_step

from ..drafters.guard import GuardedSession
from ..drafters.protocol import Drafts, Generation, Step
from ..models.cached_model import CachedModel
from .device_rows import DeviceRows, StepPlan
from .step_report import RowScores, StepResult, pack
from .token_log_probs import score


@dataclass
class SpeculativeLoop:
    """Runs the steps of a batch.

    Attributes:
        session: proposes drafts; None: plain decoding.
    """

    target: CachedModel
    session: GuardedSession | None
    generation: Generation
    rows: DeviceRows

    def step(self, plan: StepPlan) -> StepResult:
        """Drafts, verifies, and advances every row by its emitted tokens."""
        g, lap = self.generation, self.generation.stopwatch.lap
        step = self.rows.place(plan)
        drafts = self.draft(step)
        if plan.steady:
            drafts = drafts.widened(step.num_drafts)
        lap("loop")
        logits = self.score(step, drafts.tokens)
        lap("target_forwards")
        processed = g.processors(logits, step.processed, step.allowed, drafts.tokens) if g.processors else logits
        allowed, columns = step.allowed_on_device, drafts.tokens.shape[1]
        if columns < step.num_drafts:
            allowed = allowed.clamp(max=columns)
        out = speculative_step(
            processed,
            drafts.tokens,
            drafts.logits,
            params=g.params,
            seed=g.seed,
            position=step.position,
            num_drafts=allowed,
            draft_stats=drafts.stats,
            compact_q=drafts.compact,
            d2t=drafts.d2t,
            table=step.table,
            rule=g.rule,
            log_probs=plan.log_probs,
            backend=g.backend,
        )
        emitted = self.rows.advance(out)
        scored = self.score_tokens(plan, logits, out.tokens) if plan.num_scored else None
        report, reals = pack(out, drafts, allowed, emitted, scored)
        lap("kernels")
        return StepResult(drafts, logits, out, report, reals)

    def draft(self, step: Step) -> Drafts:
        """Drafts up to K tokens a row. Returns them with the q that they were drawn from."""
        drafts = self.session.draft(step) if step.num_drafts and self.session is not None else None
        return drafts or Drafts(step.last_two[:, :0])

    def score(self, step: Step, drafts: torch.Tensor) -> torch.Tensor:
        """Feeds the target the last known token and the drafts [B, k]. Returns logits [B, k + 1, V], where row i
        predicts the token after i drafts."""
        cache, columns = self.generation.target_cache, slice(1, drafts.shape[1] + 2)
        cache.lengths = step.lengths
        layout = self.target.layout(step.positions[:, columns], step.slots[:, columns], step.visible)
        # An id outside the vocabulary ends the drafts, but the target must be fed some token.
        tokens = torch.cat((step.last_two[:, 1:], drafts.clamp(0, self.target.vocab_size - 1)), 1)
        return self.target(tokens, cache, layout)

    def score_tokens(self, plan: StepPlan, logits: torch.Tensor, tokens: torch.Tensor) -> RowScores:
        """Scores the emitted ``tokens`` [B, k + 1] of the rows that asked for it under the target's own ``logits``."""
        rows = self.rows.scored[: plan.num_scored]
        own, emitted = logits.index_select(0, rows).flatten(0, 1), tokens.index_select(0, rows).clamp(min=0)
        return RowScores(rows, score(own, emitted.flatten(), plan.top).view(*emitted.shape, -1))
