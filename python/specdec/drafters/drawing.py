"""Draws the drafts of a step from a model's distributions, and keeps their q for verification."""

from __future__ import annotations

from typing import Any

import torch

from specdec_kernels import DraftStep, Rule, draft_step

from .protocol import Drafts, Generation, Step


def keeps_q(generation: Generation) -> bool:
    """Whether drafts come with their q: greedy drafts are one-hot, and ``coupled`` needs no q."""
    return not generation.greedy and generation.rule != Rule.COUPLED


def first_arrivals(logits: torch.Tensor, count: int, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first ``count`` to arrive in the race of rule ``coupled``, as a target with these ``logits`` [B,
    columns] would draw them: [B, count] int64 of the target's vocabulary, -1 where there are no more, and the status
    [B] of the rows.

    Args:
        settings: those of ``draft_step``.
    """
    found: list[DraftStep] = []
    for _ in range(count):
        if found:  # the second is the first to arrive without the first one, and so on
            column = found[-1].tokens.clamp(min=0)[:, None]
            if (d2t := settings.get("d2t")) is not None:
                column = torch.searchsorted(d2t, column)
            logits = logits.scatter(1, column, -torch.inf)
        found.append(draft_step(logits, rule=Rule.COUPLED, **settings))
    return torch.stack([draw.tokens for draw in found], 1), found[0].status


class Drawing:
    """The drafts of one step, drawn with the batch's sampling parameters from logits that come one row at a time.

    Args:
        d2t: [columns] int64, ascending: the target's ids of the columns of the logits; None: they are the same ids.
    """

    def __init__(self, generation: Generation, step: Step, d2t: torch.Tensor | None = None):
        self.generation, self.step, self.d2t = generation, step, d2t
        self.rows: list[torch.Tensor] = []  # the logits of each draft, after processors
        self.draws: list[DraftStep] = []
        self._drafts = step.last_two[:, :0]  # the drafts so far, if the next distribution depends on them

    def draw(self, logits: torch.Tensor) -> DraftStep:
        """Draws the next draft of every row from ``logits`` [B, columns]. ``keep`` takes it."""
        g, step = self.generation, self.step
        if self.draws and (step.table is not None or g.processors):
            self._drafts = torch.cat((self._drafts, self.draws[-1].tokens[:, None]), 1)
        if g.processors:
            logits = g.processors(logits[:, None], step.processed, step.allowed, self._drafts, self.d2t)[:, 0]
        self.rows.append(logits)
        draw = draft_step(
            logits,
            g.params,
            seed=g.seed,
            position=step.position,
            offset=len(self.draws),
            rule=g.rule,
            table=step.table,
            drafts=self._drafts,
            d2t=self.d2t,
            compact=g.compact_q if keeps_q(g) else 0,
            backend=g.backend,
        )
        g.stopwatch.lap("kernels")
        return draw

    def keep(self, draw: DraftStep) -> None:
        """Adds a draft to the step's."""
        self.draws.append(draw)

    def to_feed(self) -> torch.Tensor:
        """Returns the tokens [B, 1] that the model is to be fed next."""
        # -1 means that there was no distribution. The drafts end there, but the model must be fed some token.
        return self.draws[-1].tokens.clamp(min=0)[:, None]

    def drafts(self) -> Drafts:
        """Returns all that were kept."""

        def column(name: str) -> torch.Tensor:
            return torch.stack([getattr(draw, name) for draw in self.draws], 1)

        drafts, g = Drafts(column("tokens"), status=column("status"), forwards=len(self.draws)), self.generation
        if not keeps_q(g):
            return drafts
        if g.compact_q:
            return drafts._replace(compact=(column("compact_ids"), column("compact_log_q")))
        return drafts._replace(logits=torch.stack(self.rows, 1), stats=(column("cutoff"), column("lse")), d2t=self.d2t)
