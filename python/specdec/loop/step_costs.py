"""What a step costs, measured on the batch that is to be decoded."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..drafters.draft_length import step_costs
from ..drafters.protocol import Step

if TYPE_CHECKING:
    from .batch import Batch


def measured_costs(batch: Batch) -> list[float]:
    """T(0), T(1), ... of a batch: its next step, several times, with nothing entered."""
    rows = batch.rows
    room = [0 if r is None or not r.live else r.room - 1 for r in rows]
    texts = [[] if r is None else r.text for r in rows]

    def seconds(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        if batch.target.device.type == "cuda":
            torch.cuda.synchronize(batch.target.device)
        return time.perf_counter() - start

    def plan(num_drafts: int) -> Step:
        allowed = [min(num_drafts, most) for most in room]
        visible = batch.visible(max(allowed))
        wanted = torch.full_like(batch.state.wanted, num_drafts)
        return batch.plan(max(allowed), visible, allowed, texts, batch.table.on_device(), wanted)

    def verify(tokens: int) -> float:
        step = plan(tokens - 1)
        drafts = step.last_two[:, :1].expand(-1, step.num_drafts)
        return seconds(lambda: batch.forward(step, drafts))

    def draft(num_drafts: int) -> float:
        step = plan(num_drafts)
        return seconds(lambda: batch.session.draft(step)) if step.num_drafts else 0.0

    return step_costs(batch.most, draft, verify)
