"""Drafts from a smaller causal language model."""

from __future__ import annotations

from functools import partial

import torch

from specdec_kernels import DraftStep, Rule, draft_step

from ..forward import CachedModel
from . import Drafts, Generation, Step


class ModelDrafter:
    """
    Args:
        model: is fed the target's ids.
        d2t: [columns of its logits] int64, ascending: the target's ids of them; None: they are the target's.
    """

    def __init__(self, model: CachedModel, d2t: torch.Tensor | None = None):
        self.model, self.d2t = model, d2t

    def start(self, generation: Generation) -> ModelDraftSession:
        return ModelDraftSession(self.model, self.d2t, generation)


class ModelDraftSession:
    """One generation's draft cache, filled with the prompts but for their last token."""

    def __init__(self, model: CachedModel, d2t: torch.Tensor | None, generation: Generation):
        self.model, self.d2t, self.generation = model, d2t, generation
        # Greedy drafts are one-hot, and ``coupled`` needs no q.
        self.keeps_q = not generation.greedy and generation.rule != Rule.COUPLED
        self.compact = generation.compact_q if self.keeps_q else 0
        self.cache = model.new_cache(len(generation.prompts), generation.capacity)
        model.prefill(self.cache, [p[:-1] for p in generation.prompts])
        generation.stopwatch.lap("prefill")

    def draft(self, step: Step) -> Drafts:
        """The first forward gets the last *two* known tokens: after K acceptances the last draft was never
        fed, and writing the other key again costs less than a shape that depends on what was accepted."""
        g, cache, lap = self.generation, self.cache, self.generation.stopwatch.lap
        law = {"params": g.params, "seed": g.seed, "position": step.position, "rule": g.rule, "table": step.table}
        draw_from = partial(draft_step, **law, d2t=self.d2t, compact=self.compact, backend=g.backend)
        cache.lengths = step.lengths
        layout = self.model.layout(step.positions, step.slots, step.visible)
        layouts = layout.split([2] + [1] * step.num_drafts)  # the last is not used: draft K is never fed
        fed, rows, draws = step.last_two, [], []
        drafts = step.last_two[:, :0]  # so far, where the law of the next one depends on them
        lap("loop")
        for i in range(step.num_drafts):
            logits = self.model(fed, cache, layouts[i])[:, -1]
            lap("draft_forwards")
            if g.processors is not None:
                logits = g.processors(logits[:, None], step.texts, step.allowed, drafts, self.d2t)[:, 0]
            draw = draw_from(logits, offset=i, drafts=drafts)
            lap("kernels")
            rows.append(logits)
            draws.append(draw)
            if step.table is not None or g.processors is not None:
                drafts = torch.cat((drafts, draw.tokens[:, None]), 1)
            # -1 says that there was no distribution: the drafts end there, but what is fed must be a token.
            fed = draw.tokens.clamp(min=0)[:, None]
        whole = self._with_q(rows, draws)
        lap("loop")
        return whole

    def _with_q(self, rows: list[torch.Tensor], draws: list[DraftStep]) -> Drafts:
        def column(name: str) -> torch.Tensor:
            return torch.stack([getattr(draw, name) for draw in draws], 1)

        drafts = Drafts(column("tokens"), status=column("status"), forwards=len(draws))
        if not self.keeps_q:
            return drafts
        if self.compact:
            return drafts._replace(compact=(column("compact_ids"), column("compact_log_q")))
        return drafts._replace(logits=torch.stack(rows, 1), stats=(column("cutoff"), column("lse")), d2t=self.d2t)
