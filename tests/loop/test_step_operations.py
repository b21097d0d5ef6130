"""What a step launches outside of models: on a GPU each of these operations is a kernel, on a CPU a call of torch."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
from specdec import AdaptiveDrafts, Request, Scheduler, SpeculativeDecoder
from specdec.models.forward.cached_model import CachedModel
from support.models import prompts, tunable_pair
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdec_kernels import SamplingParams, ops, validation

FILTERS = {"top_k": 20, "top_p": 0.9, "min_p": 0.02}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
# Of K = 4: settings, and how many operations a step launches. q adds 3, a table one for each draft after the first.
CASES = {
    "greedy": ({"temperature": 0.0}, 19),
    "temperature": ({"temperature": 0.8}, 22),
    "one filter": ({"temperature": 0.8, "top_k": 20}, 22),
    "filters": ({"temperature": 0.8, **FILTERS}, 22),
    "one penalty": ({"temperature": 0.8, "frequency_penalty": 0.3}, 25),
    "penalties": ({"temperature": 0.8, **PENALTIES}, 25),
    "all": ({"temperature": 0.8, **FILTERS, **PENALTIES}, 25),
}


class Launches(TorchDispatchMode):
    """Counts the operations that compute something, and keeps the parameters that the package's own are given."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.sampling: list[ops.SamplingTensors] = []
        self.in_models = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not self.in_models:
            memory = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
            views = all(t.untyped_storage().data_ptr() in memory for t in _tensors(out))
            self.counts[str(func)] += func._schema.is_mutable or not views
            names = [argument.name for argument in func._schema.arguments]
            if func.namespace == ops.NAMESPACE and "sampling" in names:
                self.sampling.append(ops.SamplingTensors(*args[names.index("sampling")]))
        return out


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_launched_for_parameters(name, monkeypatch):
    settings, expected = CASES[name]
    # These read values on a CPU only.
    monkeypatch.setattr(validation, "check_counts", lambda *given: None)
    monkeypatch.setattr(validation, "check_ascending", lambda *given: None)
    decoder = SpeculativeDecoder(*tunable_pair(0.3), num_drafts=4)
    scheduler = Scheduler(decoder, rows=2, max_length=200)
    for i, text in enumerate(prompts(2, 4, 9)):
        scheduler.submit(Request(text, 150, SamplingParams(**settings), seed=i, eos_token_id=[]))
    for _ in range(2):
        scheduler.step()
    launches, forward = Launches(), CachedModel.__call__

    def unseen(self, *inputs):
        launches.in_models = True
        try:
            return forward(self, *inputs)
        finally:
            launches.in_models = False

    monkeypatch.setattr(CachedModel, "__call__", unseen)
    with launches:
        scheduler.step()
    scheduler.close()
    assert len(launches.sampling) == 5
    assert launches.counts.total() == expected, launches.counts
    # The same memory for all operations, and dense, as kernels take it.
    given = [[t for t in sampling[:3] if t is not None] for sampling in launches.sampling]
    assert len(given[0]) == 1 + bool({*FILTERS} & {*settings}) + bool({*PENALTIES} & {*settings})
    assert all(t.is_contiguous() and t.dtype == torch.float32 for t in given[0])
    assert len({tuple(t.data_ptr() for t in each) for each in given}) == 1


def plain_steps(most: int | AdaptiveDrafts, steps: int = 12, **asked) -> tuple[Counter, int]:
    """The operations of some steps in which nothing is drafted, those in models included, and the calls of Python."""
    target, draft = tunable_pair(0.3)
    decoder = SpeculativeDecoder(target, draft if most else None, most)
    scheduler = Scheduler(decoder, rows=4, max_length=200, rule="coupled")
    for i, text in enumerate(prompts(4, 4, 9)):
        scheduler.submit(Request(text, 150, SamplingParams(0.8), seed=i, eos_token_id=[], **asked))
    for _ in range(3):
        scheduler.step()
    calls, launches = 0, Launches()

    def called(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    with launches:
        for _ in range(steps):
            scheduler.step()
    sys.setprofile(called)
    try:
        for _ in range(steps):
            scheduler.step()
    finally:
        sys.setprofile(None)
    assert scheduler.batch.draft_forwards == 0 and scheduler.drafter_error is None
    return launches.counts, calls


@pytest.mark.parametrize(
    ("most", "asked"),
    [
        (4, {"num_drafts": 0}),
        (AdaptiveDrafts(4, costs=[1, 50, 99, 149, 199]), {}),
        (AdaptiveDrafts(4), {"num_drafts": 0}),
    ],
    ids=("capped", "chosen", "capped_and_learning"),
)
def test_plain_steps_of_a_drafter_cost_what_plain_decoding_costs(most, asked):
    """The same operations, and on the host a few calls of Python more a step and row, of 0.1 microseconds each."""
    plain, calls = plain_steps(0)
    launched, called = plain_steps(most, **asked)
    assert launched == plain
    assert called - calls <= 12 * 4 * 40, (called, calls)
