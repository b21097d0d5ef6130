"""Caches narrower than what the model computes: refused where nobody asked, rounded where somebody did."""

from __future__ import annotations

import pytest
import torch
from specdec import SpeculativeDecoder, StaticKVCache, speculate
from specdec.models.cache.kv_cache import cache_argument
from specdec.models.supported import cached_model
from support.feeding import feed, full_logits
from support.model_types import model_of
from support.models import generate, prompts, tiny_model
from transformers import DynamicCache, GPT2LMHeadModel, LlamaForCausalLM

CASES = ("llama", "gpt2", "bloom", "gemma3_text", "gpt_oss", "falcon, ALiBi")


class RoundedCache(DynamicCache):
    """What transformers itself stores, rounded."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def update(self, keys, values, *args, **kwargs):
        return super().update(*(x.to(self.dtype).to(x.dtype) for x in (keys, values)), *args, **kwargs)


def rounded_logits(model, sequence: list[int], dtype: torch.dtype) -> torch.Tensor:
    return model(torch.tensor([sequence]), use_cache=True, **{cache_argument(model): RoundedCache(dtype)}).logits[0]


def narrow(model, dtype: torch.dtype):
    return cached_model(model, "target", dtype)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("case", CASES)
def test_chunks_and_steps_see_rounded_keys(case, dtype):
    """Ragged prefill in chunks, steps, a rollback: logits are those of one forward whose keys were rounded at once, its
    own included, and clearly not those of exact keys."""
    model = model_of(case)
    cached = narrow(model, dtype)
    cache, known = cached.new_cache(2, 80), prompts(2, 23, 37)
    assert {t.dtype for layer in cache.layers for t in (layer.keys, layer.values)} == {dtype}
    with torch.inference_mode():
        for end in (10, 20, 60):
            starts = cache.lengths.tolist()
            cached.extend(cache, [p[:end] for p in known], starts)
        for step, counts in enumerate(((3, 5), (1, 4))):
            new = [prompts(1, n, n, seed=9 * step + n)[0] for n in counts]
            logits = feed(cached, cache, new)
            for b, (old, added) in enumerate(zip(known, new, strict=True)):
                expected = rounded_logits(model, old + added, dtype)[len(old) :]
                exact = full_logits(model, old + added)[len(old) :]
                error = (logits[b, : len(added)] - expected).abs().max()
                # Some keys lie near an edge, and round the other way in another forward.
                assert error < 0.05 * (exact - expected).abs().max()
            known = [old + added[:-1] for old, added in zip(known, new, strict=True)]
            cache.lengths -= 1


def test_it_takes_half_of_the_bytes():
    cached = narrow(tiny_model("llama"), torch.bfloat16)
    assert 2 * cached.slot_bytes() == cached_model(tiny_model("llama"), "target").slot_bytes()
    stored = cached.new_cache(3, 9)
    assert sum(t.nbytes for x in stored.layers for t in (x.keys, x.values)) == cached.slot_bytes() * 27


@torch.inference_mode()
@pytest.mark.parametrize("num_drafts", (0, 3))
def test_texts_are_those_of_the_model_with_such_a_cache(num_drafts):
    model, ids = tiny_model("llama"), [[1, 2, 3, 4, 5], [9, 8]]
    decoder = SpeculativeDecoder(model, tiny_model("llama", 1), num_drafts, cache_dtype=torch.bfloat16)
    got = decoder.generate(ids, max_new_tokens=20, eos_token_id=[]).tokens
    for prompt, tokens in zip(ids, got, strict=True):
        text = list(prompt)
        for _ in range(20):
            text.append(int(rounded_logits(model, text, torch.bfloat16)[-1].argmax()))
        assert text[len(prompt) :] == tokens


def test_a_draft_is_rounded_where_it_is_wider():
    bfloat16 = LlamaForCausalLM(tiny_model("llama", 1).config).eval().to(torch.bfloat16)
    for draft, dtype in ((tiny_model("llama", 1), torch.float16), (bfloat16, torch.bfloat16)):
        decoder = SpeculativeDecoder(tiny_model("llama"), draft, 2, cache_dtype=torch.float16)
        assert decoder.drafter.model.new_cache(1, 4).layers[0].keys.dtype == dtype
        assert len(decoder.generate([[1, 2]], max_new_tokens=9, eos_token_id=[]).tokens[0]) == 9


def test_autocast_is_refused_by_name_unless_asked_for():
    for target, draft, told in (
        (tiny_model("llama"), None, r"target: got values that come as torch.bfloat16 .* computes in torch.float32"),
        (tiny_model("gpt2"), None, "target: got keys that come as torch.bfloat16 .*cache_dtype=torch.bfloat16 to acc"),
    ):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=told):
            generate(target, draft, [[1, 2, 3]], 3, max_new_tokens=5)
    model = tiny_model("gpt2")
    decoder = SpeculativeDecoder(model, tiny_model("gpt2", 1), 3, cache_dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        text = decoder.generate([[1, 2, 3]], max_new_tokens=9, eos_token_id=[]).tokens[0]
        plain = generate_plainly(model, [1, 2, 3], 9)
    assert text == plain


def generate_plainly(model: GPT2LMHeadModel, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    return model.generate(ids, do_sample=False, max_new_tokens=count, pad_token_id=0)[0, len(prompt) :].tolist()


def test_speculate_takes_what_the_refusal_recommends():
    model, ids = tiny_model("gpt2"), torch.tensor([[5, 6, 7]])
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match="cache_dtype=torch.bfloat16 to accept it"):
            model.generate(ids, max_new_tokens=6, pad_token_id=0, custom_generate=speculate())
        accepting = speculate(cache_dtype=torch.bfloat16)
        text = model.generate(ids, max_new_tokens=6, pad_token_id=0, custom_generate=accepting)
        decoder = SpeculativeDecoder(model, None, 0, cache_dtype=torch.bfloat16)
        assert torch.equal(text, decoder.generate(ids, max_new_tokens=6).sequences)
    with pytest.raises(ValueError, match="cache_dtype: got 3"):
        model.generate(ids, max_new_tokens=6, pad_token_id=0, custom_generate=speculate(cache_dtype=3))


def test_a_cache_made_without_autocast_is_not_used_with_it():
    """Nothing is rounded in silence."""
    cached = cached_model(tiny_model("gpt2"), "target")
    cache = cached.new_cache(1, 9)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="dtype"):
        cached.prefill(cache, [[1, 2]])


def test_other_dtypes_are_refused():
    narrower = "allowed: None, or a floating dtype of 16 bits or more, narrower than"
    half = LlamaForCausalLM(tiny_model("llama").config).eval().to(torch.bfloat16)
    for model, dtype in (
        (tiny_model("llama"), torch.float64),
        (tiny_model("llama"), torch.int8),
        (tiny_model("llama"), torch.int32),
        (tiny_model("llama"), torch.float8_e4m3fn),
        (tiny_model("llama"), "bfloat16"),
        (half, torch.float32),
        (half, torch.float16),
    ):
        with pytest.raises(ValueError, match=f"cache_dtype: got {dtype}, {narrower}"):
            SpeculativeDecoder(model, None, 0, cache_dtype=dtype)
    for model, dtype in ((tiny_model("llama"), torch.float32), (half, torch.bfloat16)):
        same = SpeculativeDecoder(model, None, 0, cache_dtype=dtype).generate([[1, 2]], max_new_tokens=5)
        assert same.tokens == generate(model, None, [[1, 2]], 0, max_new_tokens=5).tokens
    decoder = SpeculativeDecoder(tiny_model("gpt2"), None, 0, cache_dtype=torch.float16)
    told = "cache_dtype: got torch.float16, allowed: None, or narrower than torch.bfloat16, as which the target's keys"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=told):
        decoder.generate([[1, 2]], max_new_tokens=5)


def test_a_cache_that_is_not_allocated_rounds_as_well():
    cache = StaticKVCache(tiny_model("llama").config, 1, 4, "cpu", dtype=torch.bfloat16)
    cache.write_at(torch.tensor([[0]]), 4)
    states = torch.full((1, 2, 1, 8), 1.001)
    keys, _ = cache.update(states, states, 0)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert keys.dtype == torch.float32 and keys[0, 0, 0, 0] == torch.tensor(1.001).bfloat16()
