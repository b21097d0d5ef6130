"""What is planned is what is allocated, before anything runs, and nothing grows from there."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from specdec import EarlyExitDrafter, PromptLookupDrafter, SpeculativeDecoder
from specdec.models import cache_plan
from specdec.models.cache import kept_cache
from specdec.models.forward.cached_model import CachedModel
from support.allocations import allocated
from support.dropped import drops_drafter
from support.model_types import model_of
from support.models import generate, prompts, tiny_model


@pytest.fixture(autouse=True)
def _no_room(monkeypatch):
    """No cache has more slots than its texts need."""
    monkeypatch.setattr(kept_cache, "ROOMY", 0)


DRAFTERS = {
    "none": lambda target: None,
    "model": lambda target: tiny_model("gpt2", 1, layers=1),  # another cost
    "early exit": lambda target: EarlyExitDrafter(target, 1),
    "lookup": lambda target: PromptLookupDrafter(),
    "itself": copy.deepcopy,
}


@pytest.mark.parametrize(
    "kind, drafter",
    [
        *(("llama", drafter) for drafter in DRAFTERS if drafter != "itself"),
        ("gemma3", "none"),
        ("bloom", "model"),
        ("qwen3_5_text", "itself"),
    ],
)
def test_the_plan_is_what_is_allocated_and_nothing_grows(caches, kind, drafter):
    target, ids = model_of(kind) if kind == "qwen3_5_text" else tiny_model(kind), prompts(3, 5, 60)
    decoder = SpeculativeDecoder(target, DRAFTERS[drafter](target), 3)
    caches.clear()  # of checks
    planned = decoder.plan_caches(3, max(map(len, ids)) + 20)
    assert not caches  # a plan allocates nothing
    decoder.generate(ids, max_new_tokens=20, eos_token_id=[])
    assert len(caches) == (2 if drafter in ("model", "itself") else 1)
    assert planned.bytes == sum(size for _, storages in caches for _, size in storages)
    assert all(
        all(layer.is_initialized for layer in cache.layers if layer not in cache.recurrent) for cache, _ in caches
    )
    assert [allocated(cache) for cache, _ in caches] == [storages for _, storages in caches]


def test_drafts_that_are_not_asked_for_cost_nothing():
    target = tiny_model("llama")
    whole = SpeculativeDecoder(target, tiny_model("gpt2", 1), 3).plan_caches(3, 20).bytes
    assert SpeculativeDecoder(target, tiny_model("gpt2", 1), 0).plan_caches(3, 20).bytes < whole
    assert SpeculativeDecoder(target, None, 0).plan_caches(3, 20).bytes == 3 * 21 * 2 * 2 * 2 * 8 * 4


def test_what_does_not_fit_is_refused_before_anything_is_allocated(caches, monkeypatch):
    monkeypatch.setattr(cache_plan, "UNCHECKED", 0)
    target, draft = tiny_model("llama"), tiny_model("gpt2", 1)
    both, asked = SpeculativeDecoder(target, draft, 3), []
    needed = both.plan_caches(2, 13).bytes
    for free, fits in ((needed, True), (needed - 1, False), (None, True)):
        monkeypatch.setattr(
            "specdec.models.forward.cached_model.free_memory", lambda device, free=free: asked.append(device) or free
        )
        caches.clear()
        if fits:
            assert len(both.generate([[1, 2, 3], [4]], max_new_tokens=10, eos_token_id=[]).tokens[1]) == 10
            continue
        told = (
            r"^cache: got 21.00 KiB \(2 rows of 14 slots at 768 bytes a token \(target 256 \+ draft 512\)\), allowed: "
        )
        with pytest.raises(ValueError, match=told):
            both.generate([[1, 2, 3], [4]], max_new_tokens=10, eos_token_id=[])
        assert not caches
    assert asked == [torch.device("cpu")] * 3
    assert generate(target, draft, [], max_new_tokens=10).tokens == []


def test_rows_that_are_rounded_up_count_as_they_are_allocated(caches, monkeypatch):
    """Under flex attention; nothing is decoded. The draft has 256 positions, and a slot for what does not count."""
    monkeypatch.setattr(cache_plan, "UNCHECKED", 0)
    both = SpeculativeDecoder(tiny_model("llama"), tiny_model("gpt2", 1), 3)
    both.target = CachedModel(tiny_model("llama"), "target", "flex")
    for length, capacity, drafts in ((40, 256, 256), (256, 512, 257)):
        taken = 256 * capacity + 512 * drafts
        for free in (taken, taken - 1):
            monkeypatch.setattr("specdec.models.forward.cached_model.free_memory", lambda device, free=free: free)
            caches.clear()
            if free == taken:
                both.generate([[1] * length], max_new_tokens=0)
                assert sum(size for _, each in caches for _, size in each) == free
                continue
            with pytest.raises(ValueError, match=f"cache: got .* of {capacity} slots"):
                both.generate([[1] * length], max_new_tokens=0)


def test_small_caches_do_not_ask(monkeypatch):
    monkeypatch.setattr("specdec.models.forward.cached_model.free_memory", lambda device: pytest.fail("asked"))
    generate(tiny_model("llama"), None, [[1]], max_new_tokens=5)


def test_a_draft_that_cannot_be_measured_is_dropped_as_any_that_fails():
    class Broken(torch.nn.Module):
        def forward(self, *args, **kwargs):
            raise ArithmeticError("broken")

    draft = copy.deepcopy(tiny_model("llama", 1))
    both = SpeculativeDecoder(tiny_model("llama"), draft, 3)
    draft.model.layers[0] = Broken().eval()
    with drops_drafter("the drafter failed and is dropped.*ArithmeticError: broken"):
        result = both.generate([[1, 2]], max_new_tokens=6, eos_token_id=[])
    assert result.tokens == generate(tiny_model("llama"), None, [[1, 2]], max_new_tokens=6).tokens


def test_memory_comes_back():
    """Without a garbage collection, of a measured cache as well."""
    target = tiny_model("llama")
    both = SpeculativeDecoder(target, tiny_model("gpt2", 1), 3)
    gc.disable()
    try:
        cache = both.target.new_cache(2, 40)
        keys = weakref.ref(cache.layers[1].keys)
        del cache
        assert keys() is None
    finally:
        gc.enable()
