"""A cache that is kept for the next text: the same texts as with a new one, whatever it held; and what is not kept."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from specdec import PromptLookupDrafter, Scheduler, SpeculativeDecoder
from specdec.models.cache import kept_cache
from specdec.models.cache.kv_cache import StaticKVCache
from specdec.models.forward.cached_model import CachedModel
from specdec.models.forward.programs import Programs
from support.model_types import model_of
from support.models import prompts, tiny_model, tunable_pair

NEW = {"max_new_tokens": 20, "eos_token_id": []}


@pytest.fixture(autouse=True)
def _no_room(monkeypatch, request):
    """Caches have the slots that their first texts need, but in a test of this."""
    if "room" not in request.node.name:
        monkeypatch.setattr(kept_cache, "ROOMY", 0)


def kept(model: CachedModel) -> list[StaticKVCache]:
    return model._kept._kept


def spoil(cache: StaticKVCache) -> None:
    """No slot holds a number that attention could use."""
    with torch.inference_mode():
        for states in cache.storage():
            states.fill_(torch.nan)


@pytest.mark.parametrize("draft", ["none", "model", "lookup"])
def test_texts_are_those_over_new_caches(draft):
    target, small = tunable_pair(0.5, layers=1)
    drafter = {"none": None, "model": small, "lookup": PromptLookupDrafter(min_ngram=1)}[draft]
    decoder = SpeculativeDecoder(target, drafter, 0 if draft == "none" else 3)
    models = [decoder.target, *([decoder.drafter.model] if draft == "model" else [])]
    used = []
    for seed, longest in ((0, 30), (1, 30), (2, 20), (3, 40), (4, 10)):
        ids = prompts(2, longest, longest, seed=seed)
        again = SpeculativeDecoder(target, drafter, decoder.num_drafts).generate(ids, **NEW)
        assert decoder.generate(ids, **NEW).tokens == again.tokens
        used.append([*map(id, (kept(model)[0] for model in models))])
        for model in models:
            spoil(kept(model)[0])
    assert used[0] == used[1] == used[2] != used[3] == used[4]


@pytest.mark.parametrize("case", ["gemma2", "ministral", "gpt_oss"])
def test_windows_and_caps_see_nothing_of_other_texts(case):
    decoder = SpeculativeDecoder(model_of(case), None, 0)
    for seed in range(3):
        ids = prompts(2, 5, 30, seed=seed)
        again = SpeculativeDecoder(model_of(case), None, 0).generate(ids, **NEW)
        assert decoder.generate(ids, **NEW).tokens == again.tokens
        if not decoder.target.reads_only_filled:  # Gemma 2 by the sdpa of older transformers, without caps
            assert kept(decoder.target) == []
            continue
        spoil(kept(decoder.target)[0])


def test_programs_are_not_made_again(monkeypatch):
    made, bind = [], Programs.bind
    monkeypatch.setattr(Programs, "bind", lambda *args: made.append(1) or bind(*args))
    decoder, other = (SpeculativeDecoder(tiny_model(), None, 0) for _ in range(2))
    for _ in range(3):
        decoder.generate(prompts(1, 9, 9), **NEW)
    assert len(made) == 1
    for longest in (9, 29, 9):  # the second one needs more slots, and the third has enough in those
        other.generate(prompts(1, longest, longest), **NEW)
    assert len(made) == 3


def test_a_cache_is_kept_for_as_many_rows_and_not_for_far_fewer_slots():
    decoder = SpeculativeDecoder(tiny_model(), None, 0)
    decoder.generate(prompts(2, 200, 200), **NEW)
    (first,) = kept(decoder.target)
    decoder.generate(prompts(2, 30, 30), **NEW)
    assert kept(decoder.target) == [first]
    decoder.generate(prompts(2, 3, 3), **NEW)
    (second,) = kept(decoder.target)
    assert second is not first and second.capacity < 30
    decoder.generate(prompts(1, 3, 3), **NEW)
    (third,) = kept(decoder.target)
    assert third is not second and third.rows == 1


def test_large_ones_and_those_of_failed_texts_are_not_kept(monkeypatch):
    decoder = SpeculativeDecoder(tiny_model(), None, 0)
    decoder.generate(prompts(1, 9, 9), **NEW)
    size = sum(states.nbytes for states in kept(decoder.target)[0].storage())

    def fails(ids, scores):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        decoder.generate(prompts(1, 9, 9), logits_processor=[fails], **NEW)
    assert not kept(decoder.target)
    for largest, count in ((size - 1, 0), (size, 1)):
        monkeypatch.setattr(kept_cache, "LARGEST", largest)
        decoder.generate(prompts(1, 9, 9), **NEW)
        assert len(kept(decoder.target)) == count


@pytest.mark.parametrize("case", ["eager", "bloom", "qwen3_next", "lfm2"])
def test_models_that_read_other_slots_keep_none(case):
    """And those with a state, which would be that of the text before."""
    if case == "eager":
        model = copy.deepcopy(tiny_model())
        model.set_attn_implementation("eager")
    else:
        model = model_of(case)
    decoder = SpeculativeDecoder(model, None, 0)
    first = decoder.generate(prompts(2, 9, 9), **NEW)
    assert not kept(decoder.target) and decoder.generate(prompts(2, 9, 9), **NEW).tokens == first.tokens


def test_texts_at_once_have_caches_of_their_own():
    decoder, ids = SpeculativeDecoder(tiny_model(), None, 0), [prompts(1, 12, 12, seed=s) for s in range(4)]
    expected = [SpeculativeDecoder(tiny_model(), None, 0).generate(own, **NEW).tokens for own in ids]
    found = [[] for _ in ids]

    def work(i: int) -> None:
        found[i] = [decoder.generate(ids[i], **NEW).tokens for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(ids))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[own] * 5 for own in expected] and len(kept(decoder.target)) == 1


def test_a_scheduler_keeps_its_own():
    decoder = SpeculativeDecoder(tiny_model(), None, 0)
    decoder.generate(prompts(2, 9, 9), **NEW)
    (cache,) = kept(decoder.target)
    scheduler = Scheduler(decoder, rows=2, max_length=20)
    assert scheduler.batch.state.target_cache is cache and not kept(decoder.target)


def test_longer_texts_find_room_in_the_cache_that_is_kept(monkeypatch):
    """And so in the programs over it; as far as that is little memory, and the model has positions."""
    made, bind = [], Programs.bind
    monkeypatch.setattr(Programs, "bind", lambda *args: made.append(1) or bind(*args))
    decoder, used = SpeculativeDecoder(tiny_model(), None, 0), []
    for longest in (9, 90, 200):
        ids = prompts(1, longest, longest)
        monkeypatch.setattr(kept_cache, "ROOMY", 0)
        expected = SpeculativeDecoder(tiny_model(), None, 0).generate(ids, **NEW).tokens
        monkeypatch.setattr(kept_cache, "ROOMY", 1 << 20)
        made.clear()
        assert decoder.generate(ids, **NEW).tokens == expected
        used.append((id(kept(decoder.target)[0]), kept(decoder.target)[0].capacity, len(made)))
    assert used == [(used[0][0], 257, n) for n in (1, 0, 0)]
    target = decoder.target
    monkeypatch.setattr(target, "max_length", None)
    assert [target.with_room(1, n) for n in (1, 256, 257, 1000)] == [256, 256, 512, 1024]
    slot = target.slot_bytes()
    monkeypatch.setattr(kept_cache, "ROOMY", 512 * slot)
    assert [target.with_room(*asked) for asked in ((1, 300), (2, 300), (1, 600), (0, 5))] == [512, 300, 600, 5]
    monkeypatch.setattr(target, "max_length", 400)
    assert [target.with_room(1, n) for n in (20, 300)] == [256, 400]


@pytest.mark.parametrize("case", ["eager", "bloom", "qwen3_next"])
def test_no_room_where_no_cache_is_kept(case):
    model = copy.deepcopy(tiny_model()) if case == "eager" else model_of(case)
    if case == "eager":
        model.set_attn_implementation("eager")
    assert CachedModel(model).with_room(1, 20) == 20
