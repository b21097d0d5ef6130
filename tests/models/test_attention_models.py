"""Whole models through flex attention: the logits of their own attention, and the user's model as it was."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from specdec import EarlyExitDrafter, SpeculativeDecoder
from specdec.models.cache.tree import Tree
from specdec.models.forward import attention, attention_choice
from specdec.models.forward.attention import with_attention
from specdec.models.forward.attention_choice import choose
from specdec.models.forward.cached_model import CachedModel
from specdec.models.supported import cached_model
from support.attending import by_blocks
from support.feeding import feed
from support.model_types import CASES, HYBRID, model_of
from support.models import prompts, tiny_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

NO_BLOCK_MASKS = ("bloom", "falcon", "falcon, ALiBi", "gpt2", "gpt_bigcode", "gptj", "mpt", "stablelm")
REFUSED = {**dict.fromkeys(NO_BLOCK_MASKS, "takes no BlockMask"), "gpt_oss": "attention sinks"}
ATTENTIVE = [case for case in CASES if case not in (*REFUSED, *HYBRID)]


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def calls(monkeypatch) -> list[torch.Tensor]:
    """The queries of every call. It reads the blocks of the mask alone; a compiled one does the same, in seconds."""
    seen = []

    def counted(query, *args, **kwargs):
        seen.append(query)
        return by_blocks(query, *args, **kwargs)

    monkeypatch.setattr(attention, "_compiled", lambda: counted)
    return seen


def ragged_logits(cached: CachedModel) -> torch.Tensor:
    """Ragged prefill, a step that is rolled back in part, a step with padding; beyond one block of slots."""
    known = [prompts(1, n, n, seed=n)[0] if n else [] for n in (0, 5, 57, 130)]
    cache, rows = cached.new_cache(4, 160), []
    cached.prefill(cache, known)
    for step, counts in enumerate(((2, 3, 1, 3), (4, 1, 5, 0))):
        new = [prompts(1, n, n, seed=100 * step + n)[0] if n else [] for n in counts]
        logits = feed(cached, cache, new)
        rows += [logits[b, :n] for b, n in enumerate(counts)]
        cache.lengths = cache.lengths - torch.tensor([max(n - 1, 0) for n in counts])
    return torch.cat(rows)


def implementations(model) -> list[str]:
    """What every module's configuration says of attention."""
    return [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]


def soft_capped():
    """By eager attention, whatever transformers' default is."""
    model = copy.deepcopy(model_of("gemma2"))
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("case", ATTENTIVE)
def test_flex_gives_the_logits_of_the_model(case, calls):
    model = soft_capped() if case == "gemma2" else model_of(case)
    before = implementations(model)
    cached = CachedModel(model, attention="flex")
    assert cached.reads_only_filled
    got = ragged_logits(cached)
    assert [q.shape[2] for q in calls] == [3, 3, 5, 5]  # two steps, two layers each; the prompts have masks
    torch.testing.assert_close(got, ragged_logits(CachedModel(model)), atol=5e-5, rtol=1e-4)
    assert len(calls) == 4 and implementations(model) == before


@pytest.mark.parametrize("case", ATTENTIVE)
def test_native_attention_gives_the_logits_of_the_model(case, monkeypatch):
    model, shapes = model_of(case), []
    attend = attention.attend_to_slots

    def spied(q, k, v, seen, **more):
        shapes.append((q.shape[1], k.shape[1], seen.shape[-1]))
        return attend(q, k, v, seen, **more)

    monkeypatch.setattr(attention, "attend_to_slots", spied)
    if choose(model) != "native":
        # Gemma 2 has sdpa in transformers 5.17, which leaves its soft cap out.
        assert model.config._attn_implementation != "sdpa" or case == "gemma2"
        return
    before = implementations(model)
    cached = CachedModel(model)
    torch.testing.assert_close(
        ragged_logits(cached), ragged_logits(CachedModel(model, attention="model")), atol=5e-5, rtol=1e-4
    )
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    stored = cached.new_cache(1, 8).layers[0].keys.shape[1]
    assert set(shapes) == {(heads, stored, 2)}
    assert implementations(model) == before


BITS = ("llama", "qwen2", "qwen3", "gemma3_text", "mistral", "phi3", "olmo2", "starcoder2")


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", BITS)
def test_bits_do_not_depend_on_how_tokens_are_fed(model_type, stored):
    """One by one, together, as a tree, beside other rows, and over keys of bfloat16. Sizes are multiples of 32: PyTorch
    computes what is left over of a vector by other functions."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"head_dim": 32, "sliding_window": 6, "vocab_size": 128, "num_hidden_layers": 3, "pad_token_id": None}
    torch.manual_seed(0)
    with torch.inference_mode(False):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**sizes, **more)).eval()
    cached = CachedModel(model, cache_dtype=None if stored == "float32" else torch.bfloat16)
    assert choose(model) == "native"
    text, others = prompts(1, 14, 14)[0], prompts(2, 5, 20, seed=2)
    caches = [cached.new_cache(1, 40), cached.new_cache(1, 60), cached.new_cache(1, 40), cached.new_cache(3, 47)]
    for cache in caches:
        cached.prefill(cache, [text[:9], *(others if cache is caches[3] else [])])
    alone = torch.cat([feed(cached, caches[0], [[token]]) for token in text[9:]], 1)
    assert torch.equal(feed(cached, caches[1], [text[9:]]), alone)
    tree = Tree.of(torch.tensor([-1, 0, 0, 1, 3, 4]))  # of which the chain 0, 1, 3, 4 is compared
    where = tree.places(caches[2].lengths, torch.ones(1, 7, dtype=torch.bool), caches[2].trash)
    fed = torch.tensor([[*text[9:12], 7, *text[12:14], 9]])
    path = torch.tensor([0, 1, 2, 4, 5])
    assert torch.equal(cached(fed, caches[2], cached.layout(*where, 39, tree))[:, path], alone)
    assert torch.equal(feed(cached, caches[3], [text[9:], others[0][:5], others[1][:5]])[:1], alone)


@pytest.mark.parametrize("case", REFUSED)
def test_what_flex_does_not_cover(case):
    model = model_of(case)
    if case == "gptj" and "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[type(model).__module__]):
        pytest.skip("transformers 5.24 has its attention exchanged as that of others")
    with pytest.raises(ValueError, match=f"attention: got 'flex' for {type(model).__name__}, .*{REFUSED[case]}"):
        choose(model, "flex")
    assert choose(model) == ("native" if case == "gpt_oss" else "model") and choose(model, "model") == "model"


def test_soft_caps_are_those_of_the_model():
    """transformers 5.17's sdpa leaves them out, and later ones refuse to run: what flex computes is neither."""
    model = soft_capped()
    assert choose(model, "flex") == "flex"
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="whose scores are soft-capped"):
        choose(model, "flex")


def test_choices(monkeypatch):
    """Our kernel, or flex without it, on a GPU; there, too, an unusual model has its own."""
    model = tiny_model()
    assert choose(model) == choose(model, "native") == "native" and choose(model, "flex") == "flex"
    told = "attention: got 'sdpa', allowed: 'auto' or 'model' or 'flex' or 'native' or 'fused'"
    with pytest.raises(ValueError, match=told):
        choose(model, "sdpa")
    with monkeypatch.context() as patch:
        patch.setattr(attention_choice, "has_native", lambda: False)
        assert choose(model) == "model"
    assert choose(copy.deepcopy(model).bfloat16()) == "model"
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr(attention_choice, "has_triton", lambda: True)
    monkeypatch.setattr(attention_choice, "has_fused_attention", lambda device_type: False)
    with pytest.raises(ValueError, match="heads have 8 numbers"):
        choose(model, "flex")
    assert choose(model) == "model"
    monkeypatch.setattr(model.config, "head_dim", 16)
    assert choose(model) == choose(model, "flex") == "flex"
    with pytest.raises(ValueError, match="got 'fused' for LlamaForCausalLM, on 'cuda', where Triton does not work"):
        choose(model, "fused")
    with monkeypatch.context() as patch:
        patch.setattr(attention_choice, "has_fused_attention", lambda device_type: device_type == "cuda")
        assert choose(model) == choose(model, "fused") == "fused" and choose(model, "flex") == "flex"
    with pytest.raises(ValueError, match="got 'native' for LlamaForCausalLM, on 'cuda'"):
        choose(model, "native")
    monkeypatch.setattr(attention_choice, "has_triton", lambda: False)
    assert choose(model) == "model"
    with pytest.raises(ValueError, match="Triton does not work"):
        choose(model, "flex")


def test_the_model_is_as_before_after_an_error(monkeypatch):
    def breaks():
        raise RuntimeError("no compiler")

    model = tiny_model("gemma3")
    cached = CachedModel(model, attention="flex")
    monkeypatch.setattr(attention, "_compiled", breaks)
    with pytest.raises(RuntimeError, match="no compiler"):
        feed(cached, cached.new_cache(1, 20), [[1, 2]])
    assert model.config._attn_implementation == "sdpa"
    model(torch.tensor([[1, 2]]))


def test_a_copy_has_its_own_configurations_and_the_same_weights():
    """One configuration may hold another's: Gemma 3 has its text's and its vision's, which may differ."""
    model = model_of("gemma3")
    sight = model.config.vision_config
    before = sight._attn_implementation_internal
    sight._attn_implementation_internal = "eager"
    try:
        own = with_attention(model, "flex")
        assert set(implementations(own)) == {"specdec_flex"}
        assert own.config.text_config._attn_implementation == "specdec_flex"
        assert set(implementations(model)) == {"sdpa", "eager"}
        assert {id(p) for p in own.parameters()} == {id(p) for p in model.parameters()}
    finally:
        sight._attn_implementation_internal = before


def test_modules_that_are_put_in_later_are_seen():
    """As adapters are. What a copied module holds was put there before; the next cache sees the rest."""
    model = copy.deepcopy(tiny_model())
    cached = CachedModel(model)
    before = feed(cached, cached.new_cache(1, 20), [[1, 2]])
    model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Tanh())
    model.model.layers[0].self_attn.q_proj = torch.nn.Sequential(
        model.model.layers[0].self_attn.q_proj, torch.nn.Tanh()
    )
    model.eval()
    after = feed(cached, cached.new_cache(1, 20), [[1, 2]])
    assert not torch.equal(before, after)
    torch.testing.assert_close(after[0], model(torch.tensor([[1, 2]])).logits[0], atol=2e-5, rtol=1e-4)


def test_a_replaced_forward_keeps_the_attention_of_the_model(monkeypatch):
    """Of a copy it would go on to run the original, whose attention takes other masks."""
    model = copy.deepcopy(tiny_model())
    assert choose(model) == "native"
    model.forward = model.forward
    assert choose(model) == "model"
    with pytest.raises(ValueError, match="of which a forward was replaced"):
        choose(model, "flex")


def test_narrower_keys_have_the_attention_of_the_model(calls):
    cached = CachedModel(tiny_model(), attention="flex", cache_dtype=torch.bfloat16)
    assert not cached.reads_only_filled
    feed(cached, cached.new_cache(1, 20), [[1, 2]])
    assert not calls


def test_capacities_are_few():
    """As attention is compiled for each; what is asked for is allocated, and planned by others."""
    cached = CachedModel(tiny_model(), attention="flex")
    assert [cached.capacity(tokens) for tokens in (1, 255, 256)] == [256, 256, 512]
    assert cached.new_cache(1, 100).capacity == CachedModel(tiny_model()).capacity(99) == 100


@pytest.mark.parametrize("draft", ("model", "early exit"))
def test_texts_are_the_same(draft, calls, monkeypatch):
    """The whole loop, target and draft; an early exit shares the target's layers, but not its configuration."""
    target = tiny_model("llama", layers=4)
    drafter = tiny_model("llama", seed=1) if draft == "model" else EarlyExitDrafter(target, 2)
    ids = prompts(2, 5, 30)

    def text():
        return SpeculativeDecoder(target, drafter, 3).generate(ids, max_new_tokens=9, eos_token_id=[]).tokens

    expected = text()
    assert not calls
    monkeypatch.setattr("specdec.models.forward.cached_model.choose", lambda model, requested: choose(model, "flex"))
    if draft == "early exit":
        drafter = EarlyExitDrafter(target, 2)
    assert text() == expected and {q.shape[2] for q in calls} >= {1, 2 if draft == "model" else 1, 4}


def test_a_new_type_is_checked_with_the_attention_that_it_gets(monkeypatch, calls):
    model = tiny_model()
    monkeypatch.setattr("specdec.models.forward.cached_model.choose", lambda model, requested: choose(model, "flex"))
    monkeypatch.setattr("specdec.models.supported.KNOWN_MODEL_TYPES", frozenset())
    cached_model(model, "target")
    assert len(calls) == 10  # two layers in five steps
    monkeypatch.setattr(attention, "_compiled", lambda: lambda query, *args, **kwargs: torch.zeros_like(query))
    with pytest.raises(ValueError, match="differ from a full forward"):
        cached_model(model, "target")


@pytest.mark.nightly
@pytest.mark.parametrize("case", ("llama", "gemma2", "qwen3", "opt"))
def test_compiled_in_a_model(case):
    model = soft_capped() if case == "gemma2" else model_of(case)
    got = ragged_logits(CachedModel(model, attention="flex"))
    torch.testing.assert_close(got, ragged_logits(CachedModel(model)), atol=5e-5, rtol=1e-4)
