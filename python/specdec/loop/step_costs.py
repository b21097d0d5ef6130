"""Measures how long steps with different K take, on the batch that is being decoded."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..drafters.draft_length import step_costs
from ..drafters.protocol import Step
from .device_rows import StepPlan
from .step import SpeculativeLoop


def measured_costs(loop: SpeculativeLoop, most_drafts: int, plan: Callable[[int], StepPlan]) -> list[float]:
    """Measures T(0), T(1), ..., T(most_drafts) of a batch, by running its next step several times without emitting.

    Args:
        plan: returns the plan of the next step with this number of drafts in every row that has room.
    """

    def seconds(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        if loop.target.device.type == "cuda":
            torch.cuda.synchronize(loop.target.device)
        return time.perf_counter() - start

    def placed(num_drafts: int) -> Step:
        return loop.rows.place(plan(num_drafts), torch.full_like(loop.rows.wanted, num_drafts))

    def verify(tokens: int) -> float:
        step = placed(tokens - 1)
        drafts = step.last_two[:, :1].expand(-1, step.num_drafts)
        return seconds(lambda: loop.score(step, drafts))

    def draft(num_drafts: int) -> float:
        step = placed(num_drafts)
        return seconds(lambda: loop.draft(step)) if step.num_drafts else 0.0

    return step_costs(most_drafts, draft, verify)
