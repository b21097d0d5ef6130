"""Whole models through the kernel that rotates, stores and attends: the logits and the keys of their own attention. It
runs in Triton's interpreter if there is no GPU. What has been deferred until then is what any other code would read."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from specdec import SpeculativeDecoder
from specdec.models.cache.kv_cache import StaticKVCache
from specdec.models.cache.tree import Tree
from specdec.models.cache_plan import UNCHECKED
from specdec.models.exchanged import deferred
from specdec.models.exchanged.deferred import Deferred, computed, deferred_rotation
from specdec.models.forward import attention
from specdec.models.forward.attention import seen_slots
from specdec.models.forward.attention_choice import choose
from specdec.models.forward.cached_model import CachedModel
from specdec_layers import MOST_ATTENDING, bytes_beside_caches
from support.attending import by_blocks, oracle, random_case
from support.feeding import feed
from support.model_types import CASES, model_of
from support.models import prompts, tiny_model
from test_attention_models import ATTENTIVE

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_fused_attention_gpu.py has them there")
# Rotation, norms of queries and keys, soft caps, windows, one key head, sinks, layers without rotation, a part of which
# is rotated, and none.
EVERY_DAY = ("llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "mistral", "smollm3", "phi")
# What rotates in a way of its own, or a part of each head: the kernel gets what it computes.
ROTATES_ITSELF = {"cohere", "cohere2", "glm", "glm4", "gpt_neox", "phi", "glm4_moe"}
NOT_AT_ALL = {"opt"}
TREE = (-1, -1, 0, 1, 2, 2)


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, bool, bool]]:
    """Of each launch, the number of tokens, whether it stores them, and whether it turns them."""
    found, real = [], deferred.store_and_attend

    def counted(q, k, *rest, angles=None, **more):
        found.append((q.shape[2], k is not None, angles is not None))
        return real(q, k, *rest, angles=angles, **more)

    monkeypatch.setattr(deferred, "store_and_attend", counted)
    return found


def fed(cached: CachedModel) -> tuple[list[torch.Tensor], StaticKVCache]:
    """The logits of ragged steps, of which a part is rolled back, and what is stored."""
    cache = cached.new_cache(2, 140)
    cached.prefill(cache, [prompts(1, n, n, seed=n)[0] for n in (5, 126)])
    rows = []
    for step, counts in enumerate(((3, 1), (2, 3))):
        new = [prompts(1, n, n, seed=100 * step + n)[0] for n in counts]
        logits = feed(cached, cache, new)
        rows += [logits[b, :n] for b, n in enumerate(counts)]
        cache.lengths = cache.lengths - torch.tensor([n - 1 for n in counts])
    return rows, cache


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in EVERY_DAY else pytest.mark.nightly) for c in (*ATTENTIVE, "gpt_oss")]
)
def test_it_gives_the_logits_and_the_keys_of_the_model(case, calls):
    model = model_of(case)
    if case == "gemma2":
        model = copy.deepcopy(model)
        model.set_attn_implementation("eager")
    (own, cache), layers = fed(CachedModel(model, attention="fused")), model.config.get_text_config().num_hidden_layers
    others, its_cache = fed(CachedModel(model, attention="model"))
    for a, b in zip(own, others, strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-4)
    for a, b in zip(cache.storage(), its_cache.storage(), strict=True):
        torch.testing.assert_close(a[:, :, :-1], b[:, :, :-1], atol=2e-5, rtol=1e-4)
    assert [tokens for tokens, *_ in calls] == [3] * 2 * layers and all(stores for _, stores, _ in calls)
    turned = [angles for *_, angles in calls]
    if case in ROTATES_ITSELF | NOT_AT_ALL:
        assert not any(turned)
    else:
        # SmolLM 3 has layers without positions.
        assert all(turned) or (case == "smollm3" and any(turned))


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "gpt_oss"])
def test_errors_of_half_precision(case):
    """No larger than those of transformers' own attention, against a forward in float32."""
    model = copy.deepcopy(model_of(case)).half()
    exact, _ = fed(CachedModel(copy.deepcopy(model).float(), attention="model"))
    errors = []
    for name in ("fused", "model"):
        logits, _ = fed(CachedModel(model, attention=name))
        errors.append(torch.cat([(a - b).abs().flatten() for a, b in zip(logits, exact, strict=True)]).mean())
    assert 0 < errors[0] <= 1.1 * errors[1]


@pytest.mark.parametrize("case", ["llama", "gemma3_text"])
def test_trees(case, calls):
    """Their nodes see their ancestors; accepted ones move, and what follows sees them."""
    model, tree = model_of(case), Tree.of(torch.tensor(TREE))
    found = []
    for name in ("fused", "model"):
        cached = CachedModel(model, attention=name)
        cache = cached.new_cache(2, 160)
        cached.prefill(cache, [prompts(1, n, n, seed=n)[0] for n in (4, 124)])
        valid = torch.arange(7) <= torch.tensor([[6], [4]])
        places = tree.places(cache.lengths, valid, cache.trash)
        tokens = torch.tensor([[3, 4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4, 3]])
        logits = cached(tokens, cache, cached.layout(*places, 140, tree))
        cache.compact(torch.tensor([[1, 3], [0, 2]]))
        cache.lengths = cache.lengths + 3
        found.append((logits[valid], feed(cached, cache, [[1, 2], [3, 4]])))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-4)
    assert [tokens for tokens, *_ in calls] == [7, 7, 2, 2]


def assert_seen(case) -> None:
    """What is seen by the rule that masks follow; what a launch must not read is NaN, or so large that only a weight of
    0 removes it."""
    keys, values = case.key.nan_to_num(), case.value.nan_to_num()
    found = deferred.attend_deferred(case.query, keys, values, seen_slots(case.queries)[:, 0])
    live = case.queries.positions > 0  # results of padding are not used
    torch.testing.assert_close(found[live].double(), oracle(*case).transpose(1, 2)[live], atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
def test_what_slots_are_seen(parents, window):
    count = 7 if parents else 4
    assert_seen(random_case((3, 126), count, capacity=200, window=window, padding=1, parents=parents, size=16))


def test_a_part_of_a_tree_in_several_forwards():
    """The last queries of a tree whose root was fed before."""
    assert_seen(random_case((3, 60), 3, capacity=80, parents=TREE, size=16))


def test_many_tokens_and_large_trees_have_flex_attention(calls, monkeypatch):
    blocks = []

    def counted(query, *args, **kwargs):
        blocks.append(query.shape[2])
        return by_blocks(query, *args, **kwargs)

    monkeypatch.setattr(attention, "_compiled", lambda: counted)
    cached = CachedModel(tiny_model(), attention="fused")
    cache = cached.new_cache(1, 100)
    assert cached.reads_only_filled and cached.attention.name == "fused"
    for tokens in (MOST_ATTENDING, MOST_ATTENDING + 1):
        feed(cached, cache, [[1] * tokens])
    assert blocks == [9, 9] and [tokens for tokens, *_ in calls] == [8, 8]
    large = Tree.of(torch.tensor([-1] * (attention.MOST_NODES + 1)))
    large = Tree(large.depths, large.ancestors[:, -2:], cache.lengths)
    places = cache.lengths[:, None] + torch.tensor([[64, 65]])
    cached(
        torch.tensor([[1, 2]]), cache, cached.layout(cache.lengths[:, None] + large.depths[:, -2:], places, 99, large)
    )
    assert blocks == [9, 9, 2, 2] and len(calls) == 2


def test_sinks_beyond_the_kernel_are_the_models_own(calls):
    """Flex attention knows none, so that more tokens have a mask of all slots."""
    cached, own = (CachedModel(model_of("gpt_oss"), attention=name) for name in ("fused", "model"))
    assert not cached.reads_only_filled
    tokens = prompts(1, 9, 9)
    logits = [feed(each, each.new_cache(1, 40), tokens) for each in (cached, own)]
    torch.testing.assert_close(*logits) and not calls


@pytest.mark.parametrize("name", ["flex", "model"])
def test_it_is_switched_off_by_a_name(name, calls, monkeypatch):
    monkeypatch.setattr(attention, "_compiled", lambda: by_blocks)
    fed(CachedModel(tiny_model(), attention=name))
    assert not calls


def test_gradients_are_flex_attentions(calls, monkeypatch):
    monkeypatch.setattr(attention, "_compiled", lambda: by_blocks)
    cached = CachedModel(copy.deepcopy(tiny_model()), attention="fused")
    cache = cached.new_cache(1, 20)
    with torch.inference_mode(False), torch.enable_grad():
        cache.lengths = torch.zeros(1, dtype=torch.int64)
        places = torch.arange(2)[None]
        layout = cached.layout(places, places, 19)
        assert not cached.attention.fuses(2, None) and layout.mask is None
    assert cached.attention.fuses(2, None) and not calls


def test_what_it_takes_beside_caches_is_planned(monkeypatch):
    own, fused = (CachedModel(tiny_model(), attention=name) for name in ("model", "fused"))
    [(keys, _)] = {*fused.layer_slots()}
    group = fused.config.num_attention_heads // keys.heads
    most = bytes_beside_caches(3, MOST_ATTENDING, keys.heads, group, 1000, keys.size, torch.float32)
    assert fused.bytes_beside_caches(3, 1000, 20) == most > fused.bytes_beside_caches(3, 1000, 1) > 0
    assert own.bytes_beside_caches(3, 1000, 5) == 0
    monkeypatch.setattr("specdec.models.forward.cached_model.choose", lambda model, requested: choose(model, "fused"))
    decoder = SpeculativeDecoder(tiny_model(), num_drafts=4)
    slots, rows = decoder.plan_caches(1, 60).capacity, 5000
    caches = decoder.plan_caches(rows, 60).bytes
    needed = caches + decoder.target.bytes_beside_caches(rows, slots, 5)
    for free in (needed, needed - 1):
        monkeypatch.setattr(decoder.target, "free_memory", lambda free=free: free)
        with pytest.raises(ValueError, match="beside them, allowed: <= ") if free < needed else nullcontext():
            assert decoder.plan_caches(rows, 60).bytes == caches > UNCHECKED


@pytest.mark.parametrize("length", [3, pytest.param(9, marks=pytest.mark.nightly)])
def test_texts_are_the_same(length, calls, monkeypatch):
    """The whole loop, target and draft, chains and plain decoding."""
    target, draft = tiny_model("llama", layers=1), tiny_model("llama", layers=1, seed=1)
    ids = prompts(2, 5, 9)

    def text(num_drafts: int) -> list:
        decoder = SpeculativeDecoder(target, draft, num_drafts)
        return decoder.generate(ids, max_new_tokens=length, eos_token_id=[]).tokens

    expected = text(2)
    assert not calls
    monkeypatch.setattr("specdec.models.forward.cached_model.choose", lambda model, requested: choose(model, "fused"))
    assert text(2) == expected and {tokens for tokens, *_ in calls} >= {1, 2, 3}
    assert text(0) == expected


# ---- what is deferred


def rotation_of(q: torch.Tensor, k: torch.Tensor, log: list) -> tuple[torch.Tensor, torch.Tensor]:
    def function(q, k, cos, sin):
        log.append("rotated")
        return q * cos, k * sin

    return deferred_rotation(function, q, k, torch.tensor(2.0), torch.tensor(3.0))


def test_whoever_reads_a_deferred_tensor_has_it_computed():
    log = []
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 2, 8)
    own_q, own_k = rotation_of(q, k, log)
    assert own_q.shape == q.shape and own_k.dtype == k.dtype and own_k.device == k.device and own_q.size(1) == 4
    assert isinstance(own_q, Deferred) and not log
    for found, exact in (
        (own_q + 1, q * 2 + 1),
        (1 + own_q, q * 2 + 1),
        (own_k.transpose(1, 2), (k * 3).transpose(1, 2)),
        (own_k[:, :1], (k * 3)[:, :1]),
        (torch.cat((own_k, k), 2), torch.cat((k * 3, k), 2)),
        (torch.matmul(own_q, own_q.mT), (q * 2) @ (q * 2).mT),
        (own_q.to(torch.float64), (q * 2).double()),
        (computed(own_k), k * 3),
    ):
        assert type(found) is torch.Tensor and torch.equal(found, exact)
    assert log == ["rotated"] and own_q.tolist() == (q * 2).tolist()


@pytest.mark.parametrize("read", ["keys", "values", "neither"])
def test_new_keys_are_stored_once(read, calls):
    """By attention, or before it by whoever reads them; the next layer that reads them stores nothing."""
    config = tiny_model().config
    cache, plain = (StaticKVCache(config, 2, 12, "cpu") for _ in range(2))
    k, v, q = (torch.randn(2, h, 3, 8) for h in (2, 2, 4))
    slots = torch.tensor([[0, 1, 2], [0, 1, 2]])
    cache.write_at(slots, 12, defers=True)
    plain.write_at(slots, 12)
    log = []
    turned_q, turned_k = rotation_of(q, k, log)
    keys, values = cache.layers[0].update(turned_k, v)
    expected = plain.layers[0].update(k * 3, v)
    assert not cache.layers[0].keys.any() and keys.shape == expected[0].shape
    if read != "neither":
        assert torch.equal({"keys": keys, "values": values}[read] + 0, expected[read == "values"])
    seen = torch.stack((torch.zeros(2, 3, dtype=torch.int64), slots + 1), -1)
    found = deferred.attend_deferred(turned_q, keys, values, seen) if read != "neither" else None
    if found is not None:
        again = deferred.attend_deferred(turned_q, keys, values, seen)
        assert torch.equal(found, again) and [stores for _, stores, _ in calls] == [False, False]
        assert torch.equal(cache.layers[0].keys, plain.layers[0].keys)
        assert torch.equal(cache.layers[0].values, plain.layers[0].values)
    cache.write_at(slots, 12)
    assert type(cache.layers[1].update(k, v)[0]) is torch.Tensor


def test_keys_that_change_after_their_rotation(calls):
    """As by a norm that comes later: the kernel turns neither those nor the queries."""
    cache, slots = StaticKVCache(tiny_model().config, 1, 12, "cpu"), torch.tensor([[0, 1, 2]])
    q, k, v = (torch.randn(1, h, 3, 8) for h in (4, 2, 2))
    cache.write_at(slots, 12, defers=True)
    turned_q, turned_k = rotation_of(q, k, [])
    keys, values = cache.layers[0].update(turned_k * 0.5, v)
    seen = torch.stack((torch.zeros(1, 3, dtype=torch.int64), slots + 1), -1)
    deferred.attend_deferred(turned_q, keys, values, seen)
    assert torch.equal(cache.layers[0].keys[:, :, :3], k * 1.5) and calls == [(3, True, False)]


def test_a_module_that_changes_keys_after_the_cache(monkeypatch, calls):
    """As code that repeats the heads of keys, or takes a slice of them, before it calls attention."""
    update = deferred.NewKeys.deferred
    monkeypatch.setattr(deferred.NewKeys, "deferred", lambda self: tuple(x * 1.0 for x in update(self)))
    own, cache = fed(CachedModel(tiny_model(), attention="fused"))
    others, its_cache = fed(CachedModel(tiny_model(), attention="model"))
    for a, b in zip(own, others, strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-4)
    for a, b in zip(cache.storage(), its_cache.storage(), strict=True):
        torch.testing.assert_close(a[:, :, :-1], b[:, :, :-1], atol=2e-5, rtol=1e-4)
    assert not any(stores for _, stores, _ in calls)


def test_the_cases_are_those_of_the_models():
    assert {*EVERY_DAY, *ROTATES_ITSELF, *NOT_AT_ALL} <= CASES.keys()
