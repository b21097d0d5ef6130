"""Drafts from a smaller causal language model."""

from __future__ import annotations

from functools import partial

import torch

from specdec_kernels import draft_step

from ..forward import CachedModel
from . import Drafts, Generation, Step


class ModelDrafter:
    def __init__(self, model: CachedModel):
        self.model = model

    def start(self, generation: Generation) -> ModelDraftSession:
        return ModelDraftSession(self.model, generation)


class ModelDraftSession:
    """One generation's draft cache, filled with the prompts but for their last token."""

    def __init__(self, model: CachedModel, generation: Generation):
        self.model, self.generation = model, generation
        self.cache = model.new_cache(len(generation.prompts), generation.capacity)
        model.prefill(self.cache, [p[:-1] for p in generation.prompts])
        generation.stopwatch.lap("prefill")

    def draft(self, step: Step) -> Drafts:
        """The first forward gets the last *two* known tokens: after K acceptances the last draft was never
        fed, and writing the other key again costs less than a shape that depends on what was accepted."""
        g, cache, lap = self.generation, self.cache, self.generation.stopwatch.lap
        draw_from = partial(draft_step, params=g.params, seed=g.seed, position=step.position, backend=g.backend)
        cache.lengths = step.lengths
        layout = self.model.layout(step.positions, step.slots, step.visible)
        layouts = layout.split([2] + [1] * step.num_drafts)  # the last is not used: draft K is never fed
        fed, rows, draws = step.last_two, [], []
        lap("loop")
        for i in range(step.num_drafts):
            logits = self.model(fed, cache, layouts[i])[:, -1]
            lap("draft_forwards")
            draw = draw_from(logits, offset=i)
            lap("kernels")
            rows.append(logits)
            draws.append(draw)
            # -1 says that there was no distribution: the drafts end there, but what is fed must be a token.
            fed = draw.tokens.clamp(min=0)[:, None]
        tokens, status = torch.stack([d.tokens for d in draws], 1), torch.stack([d.status for d in draws], 1)
        logits = stats = None  # greedy drafts are one-hot
        if not g.greedy:
            logits = torch.stack(rows, 1)
            stats = torch.stack([d.cutoff for d in draws], 1), torch.stack([d.lse for d in draws], 1)
        drafts = Drafts(tokens, logits, stats, status, forwards=step.num_drafts)
        lap("loop")
        return drafts
