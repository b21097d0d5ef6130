"""What the first text would wait for, or would have to learn, done before it comes."""

from __future__ import annotations

import time

import torch

from ..models.cache.kv_cache import visible_slots
from .batch import Batch
from .draft_length import StepOutcome
from .step_times import SEEN

LONG = 1.0  # seconds of a first forward, beside which what its recording takes is little


def warm_up(batch: Batch) -> None:
    """Prepares the target's forwards of a batch, for one row if steps may have fewer rows than the batch, for each
    number of drafts that a chain may have. Where drafts are copied, so that a step takes the time of the target's
    forward, they are timed, too. Fed is padding, which changes nothing that a sequence sees. Large models, whose steps
    take longer than anything around them, are left alone."""
    config, cache = batch.config, batch.state.target_cache
    target, lengths, rows = config.target, config.num_drafts, 1 if batch.planner.varies_rows else config.size
    copies = config.drafter is not None and config.drafter.copying
    stored = cache.lengths
    with torch.inference_mode():
        for k in () if config.nodes else lengths.widths:  # trees have shapes of their own
            tokens = torch.zeros(rows, k + 1, dtype=torch.int64, device=target.device)
            cache.lengths = tokens.new_zeros(rows)
            layout = target.layout(tokens, tokens + cache.trash, visible_slots(k + 1, cache.capacity))
            began = time.perf_counter()
            if not target.forwards.prepare(tokens, cache, layout) or time.perf_counter() - began > LONG:
                break
            for _ in range(SEEN + 2 if copies else 0):
                began = time.perf_counter()
                target(tokens, cache, layout)
                lengths.observe(StepOutcome(rows, k, k, (), time.perf_counter() - began))
    cache.lengths = stored
