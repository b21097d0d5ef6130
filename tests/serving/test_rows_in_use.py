"""Where K adapts to the batch, a step has the rows in use and few others, so that K follows the load."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from specdec import (
    AdaptiveDrafts,
    End,
    PromptLookupDrafter,
    Request,
    Scheduler,
    SpeculativeDecoder,
    SuffixDrafter,
    load_embedded_head,
    load_embedded_pair,
)
from specdec.drafters.adaptive_lengths import SharedLength
from specdec.drafters import Drafts
from specdec.loop import batch, rows_in_use
from specdec.loop.rows_in_use import RowsInUse
from specdec.models.cached_model import CachedModel
from support.crowds import Processor, finish
from support.models import prompts, tunable_pair
from support.recorded import record

from specdec_kernels import SamplingParams

ROWS = 16


@pytest.mark.parametrize(
    ("size", "factor", "sizes"),
    [(1, 2, [1]), (6, 2, [1, 2, 4, 6]), (16, 2, [1, 2, 4, 8, 16]), (16, 4, [1, 4, 16]), (20, 4, [1, 4, 16, 20])],
)
def test_numbers_of_rows(size, factor, sizes):
    """The smallest that is enough; a smaller one than before only once it has been enough for a while."""
    rows = RowsInUse(size, factor)
    assert [rows.next(used) for used in range(1, size + 1)] == [min(n for n in sizes if n >= u) for u in range(1, size + 1)]
    smallest = [rows.next(1) for _ in range(2 * rows_in_use.PATIENCE)]
    assert smallest[: rows_in_use.PATIENCE] == [size] * rows_in_use.PATIENCE and smallest[rows_in_use.PATIENCE :] == [
        1
    ] * rows_in_use.PATIENCE
    flapping = [rows.next(size if i % 2 else 1) for i in range(1, 2 * rows_in_use.PATIENCE)]
    assert flapping == [size] * len(flapping)


# ---- shapes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fed(monkeypatch) -> list[int]:
    """The numbers of rows of decoding forwards."""
    sizes, forward = [], CachedModel.__call__

    def call(self, tokens, cache, layout):
        sizes.append(len(tokens))
        return forward(self, tokens, cache, layout)

    monkeypatch.setattr(CachedModel, "__call__", call)
    return sizes


def request(i: int, new: int = 30, **more) -> Request:
    return Request(prompts(1, 3, 12, seed=i)[0], **{"max_new_tokens": new, "seed": i, "eos_token_id": [], **more})


SAMPLED = {"params": SamplingParams(1.0)}


@pytest.mark.parametrize(
    ("num_drafts", "settings", "rows"),
    [
        (AdaptiveDrafts(), {}, 1),
        (AdaptiveDrafts(), SAMPLED, 1),
        (AdaptiveDrafts(sampled=4), {}, 1),
        (AdaptiveDrafts(sampled=4), SAMPLED, ROWS),  # the text of a seed is the same in any company
        (AdaptiveDrafts(2, costs=[1, 2, 3], alone=True), {}, ROWS),
        (3, {}, ROWS),
    ],
)
def test_forwards_have_the_rows_in_use_where_k_adapts(num_drafts, settings, rows, fed):
    scheduler = Scheduler(SpeculativeDecoder(*tunable_pair(0.3), num_drafts), rows=ROWS, max_length=60)
    scheduler.submit(request(0, **settings))
    finish(scheduler)
    assert {*fed} == {rows}
    if rows == 1:
        fed.clear()
        for i in range(3):
            scheduler.submit(request(i, 4 + 2 * i, **settings))
        finish(scheduler)
        assert {*fed} == {4} or {*fed} == {4, 2, 1}


class Unaware:
    """A drafter of one's own, which counts on all rows."""

    def start(self, generation):
        class Session:
            def admit(self, prompts):
                pass

            def draft(self, step):
                assert len(step.texts) == generation.size
                return Drafts(torch.tensor([[text[-1] if text else -1] for text in step.texts]))

            def release(self, row, output):
                pass

        return Session()


def test_other_drafters_get_all_rows(fed):
    decoder = SpeculativeDecoder(tunable_pair(0.3)[0], Unaware(), AdaptiveDrafts(costs=[1.0] * 9))
    scheduler = Scheduler(decoder, rows=3, max_length=60)
    scheduler.submit(request(0))
    finish(scheduler)
    assert {*fed} == {3} and scheduler.drafter_error is None
