"""Draws the drafts of a step from a model's distributions, and keeps their q for verification."""

from __future__ import annotations

from typing import Any

import torch

from specdec_kernels import DraftStep, Rule, draft_step

from .protocol import BatchState, Drafts, Step


def keeps_q(batch: BatchState, step: Step) -> bool:
    """Whether drafts come with their q: greedy drafts are one-hot, and ``coupled`` needs no q."""
    return not step.greedy and batch.rule != Rule.COUPLED


def first_arrivals(logits: torch.Tensor, count: int, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first ``count`` to arrive in the race of rule ``coupled``, as a target with these ``logits`` [B,
    columns] would draw them: [B, count] int64 of the target's vocabulary, -1 where there are no more, and the status
    [B] of the rows.

    Args:
        settings: those of ``draft_step``.
    """
    draws: list[DraftStep] = []
    for _ in range(count):
        if draws:  # the second is the first to arrive without the first one, and so on
            column = draws[-1].tokens.clamp(min=0)[:, None]
            if (d2t := settings.get("d2t")) is not None:
                column = torch.searchsorted(d2t, column)
            logits = logits.scatter(1, column, -torch.inf)
        draws.append(draft_step(logits, rule=Rule.COUPLED, **settings))
    return torch.stack([draw.tokens for draw in draws], 1), draws[0].status


class Drawing:
    """The drafts of one step, drawn with the batch's sampling parameters from logits that come one row at a time.

    Args:
        d2t: [columns] int64, ascending: the target's ids of the columns of the logits; None: they are the same ids.
    """

    def __init__(self, batch: BatchState, step: Step, d2t: torch.Tensor | None = None):
        self.batch, self.step, self.d2t = batch, step, d2t
        self.rows: list[torch.Tensor] = []  # the logits of each draft, after processors
        self.draws: list[DraftStep] = []
        self.masked = 0  # how many drafts, from the first on, were drawn from what grammars allow
        self._drafts = step.last_two[:, :0]  # the drafts so far, if the next distribution depends on them

    def draw(self, logits: torch.Tensor) -> DraftStep:
        """Draws the next draft of every row from ``logits`` [B, columns]. ``keep`` takes it."""
        batch, step = self.batch, self.step
        grammars, masking = batch.grammars, batch.grammars.while_drafting(len(self.draws))
        if self.draws and (step.sampling.table_ids is not None or batch.processors or masking):
            self._drafts = torch.cat((self._drafts, self.draws[-1].tokens[:, None]), 1)
        if batch.processors:
            logits = batch.processors.of_next_draft(logits, step.seen, step.allowed, self._drafts, self.d2t)
        self.rows.append(logits)
        masks = grammars.after(grammars.send(self._drafts))[:, -1].contiguous() if masking else None
        self.masked += masking
        draw = draft_step(
            logits,
            step.sampling,
            seed=step.seed,
            position=step.position,
            offset=len(self.draws),
            rule=batch.rule,
            drafts=self._drafts,
            d2t=self.d2t,
            allowed=masks,
            backend=batch.backend,
        )
        batch.timer.lap("kernels")
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

        drafts = Drafts(column("tokens"), status=column("status"), forwards=len(self.draws))
        if not keeps_q(self.batch, self.step):
            return drafts
        return drafts._replace(
            logits=torch.stack(self.rows, 1), stats=(column("cutoff"), column("lse")), d2t=self.d2t, masked=self.masked
        )
