"""The ragged static cache against full forwards, and what is refused because it cannot have one."""

from __future__ import annotations

import copy

import pytest
import torch
from specdec import SpeculativeDecoder, StaticKVCache
from specdec.models.forward.cached_model import CachedModel
from specdec.models.full_forward import check_against_full_forward
from specdec.models.supported import cached_model
from support.feeding import assert_rows, feed, full_logits
from support.models import POSITIONS, TYPES, VOCABULARY, WINDOW, prompts, tiny_model
from transformers import (
    Gemma3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("implementation", ("sdpa", "eager"))
@pytest.mark.parametrize("kind", TYPES)
def test_ragged_cache_equals_full_forwards(kind, implementation):
    """Ragged prefill (one prompt empty), ragged steps, rollback by different amounts, overwriting; the
    sequences are several windows of Gemma-3 long and cross the multiple of 64 slots at which attention sees
    more of the cache."""
    model = tiny_model(kind)
    if kind != "bloom":
        model.set_attn_implementation(implementation)
    try:
        cached = cached_model(model, "target")
        known = [prompts(1, n, n, seed=n)[0] if n else [] for n in (0, 5, 23, 57)]
        assert max(map(len, known)) > 3 * WINDOW
        cache = cached.new_cache(4, 90)
        cached.prefill(cache, known)
        for step, counts in enumerate(((1, 2, 3, 1), (4, 1, 5, 5), (3, 3, 3, 3), (2, 0, 1, 6))):
            new = [prompts(1, n, n, seed=100 * step + n)[0] if n else [] for n in counts]
            assert_rows(model, feed(cached, cache, new), known, new)
            keep = [max(n - 1 - b % 2, 0) for b, n in enumerate(counts)]
            known = [old + added[:k] for old, added, k in zip(known, new, keep, strict=True)]
            cache.lengths = torch.tensor([len(k) for k in known])
    finally:
        if kind != "bloom":
            model.set_attn_implementation("sdpa")


def test_window_is_that_of_transformers():
    """A full forward of the sliding model must differ from one without a window, or the test above shows nothing."""
    model = tiny_model("gemma3")
    wide = Gemma3ForCausalLM(type(model.config)(**{**model.config.to_dict(), "sliding_window": 200})).eval()
    wide.load_state_dict(model.state_dict())
    sequence = prompts(1, 40, 40)[0]
    difference = (full_logits(model, sequence) - full_logits(wide, sequence)).abs().amax(-1)
    assert difference[:WINDOW].max() < 1e-5
    assert difference[WINDOW:].max() > 1e-2


def test_all_layers_slide():
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=WINDOW,
        max_position_embeddings=POSITIONS,
    )  # fmt: skip
    cached = cached_model(MistralForCausalLM(config).eval(), "target")
    known, new = [prompts(1, 30, 30)[0], prompts(1, 3, 3)[0]], prompts(2, 4, 4, seed=3)
    cache = cached.new_cache(2, 40)
    cached.prefill(cache, known)
    assert_rows(cached.model, feed(cached, cache, new), known, new)


def test_storage_is_preallocated_and_stays():
    cached = cached_model(tiny_model("llama"), "target")
    cache = cached.new_cache(2, 100)
    cached.prefill(cache, prompts(2, 5, 9))
    before = [(layer.keys.data_ptr(), layer.values.data_ptr(), layer.keys.shape) for layer in cache.layers]
    assert before[0][2] == (2, 2, 100, 8)
    for step in range(20):
        feed(cached, cache, prompts(2, 1, 4, seed=step))
    assert before == [(layer.keys.data_ptr(), layer.values.data_ptr(), layer.keys.shape) for layer in cache.layers]
    assert cache.get_max_length() == 100


def test_memory_is_freed_without_a_garbage_collection():
    import gc
    import weakref

    cached = cached_model(tiny_model("llama"), "target")
    gc.disable()
    try:
        cache = cached.new_cache(1, 10)
        cached.prefill(cache, [[1, 2, 3]])
        keys = weakref.ref(cache.layers[0].keys)
        del cache
        assert keys() is None
    finally:
        gc.enable()


def test_heads_of_keys_and_values_may_differ_in_size():
    cache = StaticKVCache(tiny_model("llama").config, 2, 8, "cpu")
    cache.write_at(torch.tensor([[2], [4]]), 6)
    keys, values = cache.update(torch.ones(2, 3, 1, 4), torch.full((2, 3, 1, 7), 2.0), 0)
    assert keys.shape == (2, 3, 6, 4) and values.shape == (2, 3, 6, 7)
    assert keys.sum((1, 3)).nonzero().tolist() == values.sum((1, 3)).nonzero().tolist() == [[0, 2], [1, 4]]


def test_capacity_is_checked():
    with pytest.raises(ValueError, match=r"capacity: got 1"):
        StaticKVCache(tiny_model("llama").config, 1, 1, "cpu")


def test_models_without_a_rewindable_state_are_refused_by_type():
    rwkv = RwkvForCausalLM(RwkvConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2)).eval()
    with pytest.raises(ValueError, match=r"target: model type 'rwkv' keeps a state"):
        cached_model(rwkv, "target")
    t5 = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match=r"draft: model type 't5' is an encoder-decoder"):
        cached_model(T5ForConditionalGeneration(t5).eval(), "draft")
    with pytest.raises(ValueError, match=r"target: got Linear"):
        cached_model(torch.nn.Linear(2, 2), "target")


def test_training_mode_is_refused():
    config = LlamaConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ValueError, match=r"target: is in training mode"):
        cached_model(LlamaForCausalLM(config).train(), "target")


def test_a_model_that_is_trained_meanwhile_is_refused_until_it_evaluates_again():
    target = copy.deepcopy(tiny_model("llama"))
    decoder = SpeculativeDecoder(target, num_drafts=2)
    text = decoder.generate([[1, 2]], max_new_tokens=4).tokens
    for module in (target, target.model.layers[0].self_attn):
        module.train()
        with pytest.raises(ValueError, match="target: (LlamaAttention )?is in training mode"):
            decoder.generate([[1, 2]], max_new_tokens=4)
        target.eval()
        assert decoder.generate([[1, 2]], max_new_tokens=4).tokens == text


def test_first_use_check_passes_good_models_and_names_bad_ones(monkeypatch):
    for kind in TYPES:
        check_against_full_forward(tiny_model(kind), "target")
    right = CachedModel.layout
    monkeypatch.setattr(CachedModel, "layout", lambda self, positions, *rest: right(self, positions * 0, *rest))
    with pytest.raises(ValueError, match=r"target: model type 'llama' .* differ from a full forward by up to \d"):
        check_against_full_forward(tiny_model("llama"), "target")


@pytest.mark.parametrize("attention", ["model", "auto"])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_sequence_is_not_spoiled_by_the_one_before(part, attention):
    """A masked slot has weight 0, but 0 times NaN is NaN."""
    cached = CachedModel(tiny_model(), attention=attention)
    with torch.inference_mode():
        cache, other = cached.new_cache(2, 70), cached.new_cache(2, 70)
        for row in (0, 1):
            cache.begin(row)
        cached.prefill(cache, prompts(2, 20, 20))
        for layer in cache.layers:
            getattr(layer, part)[1] = float("nan")
        cache.begin(1)
        text = prompts(2, 9, 9, seed=3)
        for each in (cache, other):
            cached.prefill(each, text)
        got, expected = (feed(cached, each, [[1, 2], [3, 4]]) for each in (cache, other))
    assert torch.equal(got, expected) and got.isfinite().all()
