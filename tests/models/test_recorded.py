"""Recorded forwards: the bits of forwards that run the modules, for every model type; and what is not recorded."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from specdec.models.cached_model import CachedModel
from specdec.models.recorded import RecordedForwards, is_recordable, record
from support.feeding import feed
from support.model_types import CASES, model_of
from support.models import prompts, tiny_model
from torch import nn


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


class NotRecorded(CachedModel):
    def _replayed(self, tokens, cache, layout):
        return self._run(self._steps, tokens, cache, layout).logits


def both(model):
    """The model, by recordings and without."""
    return CachedModel(model), NotRecorded(model)


def replays(cached: CachedModel) -> int:
    return sum(recorded.replays for recorded in cached._recorded.values())


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_the_modules(case):
    """Rows of other lengths, rejected drafts, and a row that is idle, over two caches."""
    replayed, called = both(model_of(case))
    for seed in range(2):
        caches = [cached.new_cache(2, 60, window=4) for cached in (replayed, called)]
        known = prompts(2, 3, 9, seed=seed)
        for cached, cache in zip((replayed, called), caches, strict=True):
            cached.prefill(cache, known)
        lengths = torch.tensor([len(k) for k in known])
        for step, counts in enumerate(((3, 3), (3, 2), (3, 3), (3, 0), (3, 3), (1, 1), (1, 1), (1, 1))):
            new = [prompts(1, n, n, seed=10 * step + i)[0] if n else [] for i, n in enumerate(counts)]
            results = []
            for cached, cache in zip((replayed, called), caches, strict=True):
                cache.lengths = lengths.clone()
                results.append(feed(cached, cache, new))
            assert all(torch.equal(*rows) for rows in zip(*results, strict=True))
            lengths = lengths + torch.tensor([max(n - step % 2, 0) for n in counts])
    assert replays(replayed) > 0


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x * x.sum().item(),
        lambda x: x * float(x.sum()),
        lambda x: x + 1 if x.sum() > 0 else x - 1,
        lambda x: x + len([n for n in x.tolist() if n > 0]),
        lambda x: x + float(x.numpy().sum()),
        lambda x: x[x > 0].sum(),
        lambda x: x.nonzero().sum(),
        lambda x: torch.tensor(x.unique().numel()) + x,
    ],
)
def test_what_depends_on_numbers_is_not_recorded(forward):
    x = torch.tensor([1.0, -2.0, 3.0])
    recorded = RecordedForwards()
    for given in (x, x, x, -x, -x):
        assert torch.equal(recorded.run("key", forward, given), forward(given))
    assert recorded.replays == 0


def test_inputs_that_are_one_tensor_stay_two_inputs():
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 7.0])
    _, replay = record(lambda a, b: a - 2 * b, x, x)
    assert replay(x, y).tolist() == [-9.0, -12.0]


def test_what_is_no_input_is_the_object_that_it_was():
    kept, x = torch.zeros(2, 3), torch.ones(2)

    def forward(x):
        kept[:, 1].add_(x)
        return kept.reshape(3, 2).sum(0) + kept.t().reshape(-1)[:2]  # the second one copies

    recorded, expected = RecordedForwards(), torch.zeros(2, 3)
    for step in range(5):
        found = recorded.run("key", forward, x * step)
        expected[:, 1] += x * step
        assert torch.equal(found, expected.reshape(3, 2).sum(0) + expected.t().reshape(-1)[:2])
    assert recorded.replays == 3


def test_results_are_freed_when_no_call_needs_them():
    def forward(x):
        for _ in range(9):
            x = x * 2
        return x

    _, replay = record(forward, torch.ones(4))
    assert replay.__code__.co_varnames == ("x0", "v0")
    assert replay(torch.ones(4)).tolist() == [512.0] * 4


def test_the_oldest_recordings_go():
    recorded = RecordedForwards(most=2)
    for key in (1, 1, 2, 2, 3, 3):
        recorded.run(key, lambda x: x + 1, torch.ones(key))
    assert [*recorded._known] == [2, 3]
    for _ in range(3):
        recorded.run(1, lambda x: x + 1, torch.ones(1))
    assert [*recorded._known] == [3, 1] and recorded.replays == 1


def test_hooks_and_adapters_are_run():
    model, calls = copy.deepcopy(tiny_model()), []
    assert is_recordable(model)
    handle = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    cached = CachedModel(model)
    cache = cached.new_cache(1, 20)
    calls.clear()
    for _ in range(4):
        feed(cached, cache, [[3]])
    assert len(calls) == 4 and not is_recordable(model)
    handle.remove()
    cached.new_cache(1, 20)
    assert cached._records
    model.model.layers[0].register_module("lora", type("LoraLayer", (nn.Module,), {"__module__": "peft.tuners"})())
    assert not is_recordable(model)


def test_new_weights_are_used_and_a_cache_takes_its_recordings_with_it():
    model = copy.deepcopy(tiny_model())
    replayed, called = both(model)
    caches = [cached.new_cache(1, 20) for cached in (replayed, called)]
    for step in range(5):
        if step == 4:
            model.lm_head.weight.mul_(2)
        assert torch.equal(
            *(feed(cached, cache, [[3]]) for cached, cache in zip((replayed, called), caches, strict=True))
        )
    assert replays(replayed) == 3
    stored = weakref.ref(caches[0].layers[0].keys)
    del caches
    gc.collect()
    assert stored() is None and not replayed._recorded
