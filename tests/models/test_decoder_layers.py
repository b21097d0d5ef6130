"""Decoder layers whose additions are computed with the norms that follow. By default that is so on a GPU; here it is
asked for on a CPU, where the operation does what an addition and a norm do, so that all results have the same bits."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections import Counter

import pytest
import torch
from specdec import EarlyExitDrafter, SpeculativeDecoder
from specdec.models.cache.features import BEFORE_NORM, tapped
from specdec.models.exchanged.decoder_layers import with_native_layers
from specdec.models.exchanged.deferred import computed, source_of
from specdec.models.exchanged.elementwise import with_elementwise
from specdec.models.exchanged.norms import Sum
from specdec.models.forward.cached_model import CachedModel
from support.captured import on_gpu
from support.feeding import feed
from support.model_types import CASES, model_of
from support.models import generate, prompts, tiny_model, tunable_pair
from support.native_layers import layers_of, noted_sums, on_a_cpu, unhooked
from torch import nn

# What adds to the norms of branches, scales what it adds, returns more than a tensor, has branches beside each other,
# or norms that are not RMSNorm.
OTHERS = {
    "bamba", "bloom", "cohere", "cohere2", "falcon", "falcon, ALiBi", "falcon_h1", "gpt2", "gpt_bigcode", "gpt_neox",
    "gptj", "granite", "mamba2", "mpt", "nemotron_h", "olmo", "olmo2", "olmo3", "opt", "phi", "stablelm", "starcoder2",
    "zamba2",
}  # fmt: skip
TRIED = [
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3", "olmo2", "olmo_hybrid", "glm4", "phi3",
    "qwen3_moe", "gpt_oss", "lfm2", "jamba", "qwen3_5_text", "granitemoe",
]  # fmt: skip


@pytest.fixture
def exchanged(monkeypatch):
    """Every cached model that is made later has such layers, on a CPU, too."""
    own = functools.partial(with_native_layers, device="cpu")
    monkeypatch.setattr("specdec.models.forward.forwards.with_native_layers", own)


@pytest.fixture
def calls(monkeypatch):
    return noted_sums(monkeypatch)


@pytest.mark.parametrize("case", CASES)
def test_which_are_recognised(case):
    model = model_of(case)
    before = {name: type(m) for name, m in model.named_modules()}
    fast = on_a_cpu(model)
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    # OLMo's hybrids have layers of both kinds, and so has LFM 2 in transformers 5.17, whose convolutions look for an
    # argument that the layer has no name for.
    looks = any(
        "seq_idx" in inspect.getsource(type(m).forward) for m in model.modules() if "DecoderLayer" in type(m).__name__
    )
    known = 0 if case in OTHERS else 2 if case == "olmo_hybrid" else 1 if case.startswith("lfm2") and looks else count
    assert len(layers_of(fast)) == known
    assert {name: type(m) for name, m in model.named_modules()} == before
    assert [name for name, _ in fast.named_modules()] == [*before]
    assert [*fast.state_dict()] == [*model.state_dict()]
    assert not layers_of(with_native_layers(with_elementwise(model)))


@pytest.mark.parametrize("case", TRIED)
@torch.inference_mode()
def test_they_compute_the_same(case, exchanged, calls, monkeypatch):
    model, texts = model_of(case), prompts(2, 9, 9)

    def logits() -> list[torch.Tensor]:
        cached = CachedModel(model)
        cache = cached.new_cache(2, 40, 5)
        parts = (slice(0, 1), slice(1, 3), slice(3, 8), slice(8, 9))
        return [feed(cached, cache, [text[part] for text in texts]) for part in parts]

    found, fused = logits(), len(calls)
    monkeypatch.setattr("specdec.models.forward.forwards.with_native_layers", lambda model: model)
    assert all(map(torch.equal, found, logits()))
    assert len(calls) == fused and (fused == 0) == (case in OTHERS)


@torch.inference_mode()
def test_nothing_is_kept(calls):
    """A sum is computed once, with the norm that asks for it first or without one, and then keeps nothing else."""
    fast = on_a_cpu(unhooked(tiny_model("llama", layers=3)))
    x, cos_sin = torch.randn(1, 4, 32), (torch.randn(1, 4, 8), torch.randn(1, 4, 8))
    for layer in fast.model.layers:
        x = layer(x, position_embeddings=cos_sin)
    assert len(calls) == 5 and isinstance(added := source_of(x), Sum)
    kept = [weakref.ref(y) for y in (added.x, added.delta)]
    del added
    normed = fast.model.norm(x)
    assert len(calls) == 6 and calls[-1][1] is normed and computed(x) is calls[-1][0] and source_of(x) is None
    assert torch.equal(fast.model.norm(x), normed) and fast.model.norm(x) is not normed and len(calls) == 6
    other = fast.model.layers[0](x, position_embeddings=cos_sin)
    alone = other + 0
    assert torch.equal(computed(other), alone) and source_of(other) is None
    assert torch.equal(fast.model.norm(other), fast.model.norm(alone)) and len(calls) == 7
    kept += [weakref.ref(y) for pair in calls for y in pair]
    calls.clear()
    del x, normed
    assert not any(reference() is not None for reference in kept)


@torch.inference_mode()
def test_a_sum_is_what_any_other_code_reads():
    """As for a caller that takes some of the layers, or does something between them."""
    model = unhooked(tiny_model("llama", layers=3))
    fast, cos_sin = on_a_cpu(model), (torch.randn(1, 4, 8), torch.randn(1, 4, 8))
    x = torch.randn(1, 4, 32)

    def after(of: nn.Module) -> torch.Tensor:
        return of.model.layers[1](of.model.layers[0](x, position_embeddings=cos_sin), position_embeddings=cos_sin)

    plain = with_elementwise(model)
    expected = after(plain)
    with torch.no_grad():
        for norm in (fast.model.norm, plain.model.norm):
            norm.weight = nn.Parameter(torch.randn(32, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(fast.model.norm(after(fast)), plain.model.norm(expected))
    for other in (lambda y: y.clone(), lambda y: 2 * y, lambda y: y[:, 1:]):
        y = other(after(fast))
        own = tuple(part[:, -y.shape[1] :] for part in cos_sin)
        found, its = (of.model.layers[2](other(after(of)), position_embeddings=own) for of in (fast, plain))
        assert torch.equal(found, its)


def changed(module, args, output):
    for own in output if isinstance(output, tuple) else (output,):
        if isinstance(own, torch.Tensor):
            own[..., ::3].mul_(3)


def changed_before(module, args, kwargs):
    for own in (*args, *kwargs.values()):
        if isinstance(own, torch.Tensor) and own.is_floating_point() and own.dim() == 3:
            own[..., ::3].mul_(3)


PLACES = [
    "model.layers.0", "model.layers.1", "model.layers.1.input_layernorm", "model.layers.0.post_attention_layernorm",
    "model.layers.0.pre_feedforward_layernorm", "model.layers.1.post_feedforward_layernorm", "model.norm",
    "model.layers.1.self_attn", "model.layers.0.mlp",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("before", [False, True])
@torch.inference_mode()
def test_hooks_may_change_what_they_are_given(place, before, exchanged):
    """In place, and at any module, as those that steer a model do."""
    model = copy.deepcopy(model_of("gemma2"))
    tokens = torch.tensor(prompts(1, 7, 7))
    without = model(tokens).logits
    module, count = model.get_submodule(place), Counter[str]()

    def counted(*args):
        count["called"] += 1
        (changed_before if before else changed)(*args)

    cached = CachedModel(model)
    add = (
        functools.partial(module.register_forward_pre_hook, with_kwargs=True)
        if before
        else module.register_forward_hook
    )
    handle = add(counted)
    expected, times = model(tokens).logits, count["called"]
    count.clear()
    for own in (cached, CachedModel(model)):  # a model that was made before the hook was added, and after
        found = feed(own, own.new_cache(1, 20), tokens.tolist())
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert count["called"] >= 2 * times > 0 and not torch.allclose(expected, without, atol=1e-3)
    handle.remove()
    found = feed(cached, cached.new_cache(1, 20), tokens.tolist())
    torch.testing.assert_close(found, without, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "place", ["model.layers.1", "model.layers.1.input_layernorm", "model.norm", "model.layers.0.mlp"]
)
@torch.inference_mode()
def test_forwards_that_were_replaced_are_called(place, exchanged):
    model = copy.deepcopy(tiny_model())
    module, tokens, called = model.get_submodule(place), torch.tensor(prompts(1, 7, 7)), []
    own = module.forward
    module.forward = lambda *args, **kwargs: (called.append(place), own(*args, **kwargs))[1]
    cached = CachedModel(model, attention="model")
    found = feed(cached, cached.new_cache(1, 20), tokens.tolist())
    assert called
    torch.testing.assert_close(found, model(tokens).logits, atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_hidden_states_are_the_models(calls):
    model, tokens = copy.deepcopy(model_of("gemma3_text")), torch.tensor(prompts(1, 7, 7))
    expected = model(tokens, output_hidden_states=True).hidden_states  # by hooks, which stay
    found = on_a_cpu(model)(tokens, output_hidden_states=True).hidden_states
    for own, its in zip(found, expected, strict=True):
        torch.testing.assert_close(own, its, atol=2e-5, rtol=1e-4)
    assert len(calls) == 2  # within the layers


@pytest.mark.parametrize("states", [(0, 1, 2, 3), (2,), (BEFORE_NORM, 1)])
@torch.inference_mode()
def test_features_are_those_of_plain_layers(states, calls):
    """As heads read them, by hooks on copies of some layers."""
    model, tokens = unhooked(tiny_model("qwen3", layers=3)), torch.tensor(prompts(1, 7, 7))
    seen = []
    for own in (with_elementwise(model), on_a_cpu(model)):
        copied, taken = tapped(own, states)
        logits = copied(tokens, use_cache=False).logits
        seen.append([logits, *(taken[state] for state in states)])
    assert all(map(torch.equal, *seen)) and calls


def test_texts_with_early_exit_and_adapters(exchanged, calls):
    target, draft = tunable_pair(0.3)
    ragged = prompts(3, 2, 20)
    expected = generate(target, None, ragged, 0, max_new_tokens=12).tokens
    for drafter in (draft, EarlyExitDrafter(target, 1)):
        calls.clear()
        assert generate(target, drafter, ragged, max_new_tokens=12).tokens == expected and calls
    peft = pytest.importorskip("peft")
    for config in (
        peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False),
        peft.LoraConfig(
            target_modules=["q_proj"], modules_to_save=["post_attention_layernorm"], init_lora_weights=False
        ),
    ):
        torch.manual_seed(0)
        model = peft.get_peft_model(copy.deepcopy(target), config).eval()
        calls.clear()
        found = generate(model, draft, ragged, max_new_tokens=12).tokens
        ids = torch.tensor([ragged[0]])
        own = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12,
                             eos_token_id=None, pad_token_id=0)  # fmt: skip
        assert found[0] == own[0, ids.shape[1] :].tolist() and found != expected and calls


def test_numbers_that_are_changed_later_are_seen(exchanged, calls):
    """An epsilon by the norms, and by layers whether they are branches at all."""
    model = copy.deepcopy(model_of("granitemoe"))
    decoder, own = SpeculativeDecoder(model, num_drafts=0), {"max_new_tokens": 4, "output_logits": True}

    def logits(of: SpeculativeDecoder) -> torch.Tensor:
        return of.generate([[5, 6]], **own).logits[0][0]

    before = logits(decoder)
    assert calls
    for name, value in (
        ("model.layers.1.post_attention_layernorm.variance_epsilon", 0.5),
        ("model.norm.variance_epsilon", 2.0),
    ):
        module, _, number = name.rpartition(".")
        setattr(model.get_submodule(module), number, value)
        found = logits(decoder)
        torch.testing.assert_close(found, logits(SpeculativeDecoder(model, num_drafts=0)))
        assert not torch.allclose(found, before, atol=1e-4)
        before = found
    for layer in model.model.layers:
        layer.residual_multiplier = 0.5
    calls.clear()
    found = logits(decoder)
    assert not calls and not torch.allclose(found, before, atol=1e-4)
    torch.testing.assert_close(found, logits(SpeculativeDecoder(model, num_drafts=0)))


def test_gradients_are_the_layers_own(calls):
    model = copy.deepcopy(tiny_model())
    tokens = torch.tensor(prompts(1, 7, 7))
    for own in (on_a_cpu(model), on_a_cpu(model).train()):
        model.zero_grad()
        own(tokens).logits.sum().backward()
        assert model.model.layers[0].input_layernorm.weight.grad.abs().sum() > 0 and not calls


@torch.inference_mode()
def test_arguments_are_the_layers_own(calls):
    """In places, by names, too few and unknown ones."""
    model = unhooked(model_of("qwen3_5_text"))
    fast, plain = (of(model).model.layers[1] for of in (on_a_cpu, with_elementwise))
    x, cos_sin = torch.randn(1, 4, 32), (torch.randn(1, 4, 4), torch.randn(1, 4, 4))
    for args, kwargs in (((x, cos_sin), {}), ((x,), {"position_embeddings": cos_sin, "anything": 3}),
                         ((), {"hidden_states": x, "position_embeddings": cos_sin})):  # fmt: skip
        assert torch.equal(fast(*args, **kwargs), plain(*args, **kwargs))
    assert len(calls) == 2  # in the layer, which nothing follows
    with pytest.raises(TypeError, match="position_embeddings"):
        fast(x)


@on_gpu
@pytest.mark.parametrize("case", ["llama", "gemma2", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_on_a_gpu_they_compute_the_same(case, dtype, calls):
    model = unhooked(model_of(case)).to("cuda", dtype)
    plain = with_elementwise(model)
    fast = with_native_layers(plain)
    for queries in (1, 2, 5):
        tokens = torch.tensor(prompts(2, queries, queries)).cuda()
        assert torch.equal(fast(tokens, use_cache=False).logits, plain(tokens, use_cache=False).logits)
    assert len(calls) == 3 * 2 * model.config.num_hidden_layers
