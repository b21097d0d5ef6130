"""What products of few tokens compute on their way: the norm before them, a gate, or the sum after them. That is so on
a GPU; here a CPU stands for it. Nobody finds out: neither by logits and texts, nor by hooks, adapters or modules of
other kinds."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from specdec import SpeculativeDecoder
from specdec.models.cache.tree import Tree
from specdec.models.exchanged import product as on_the_way
from specdec.models.exchanged.deferred import Deferred, computed, source_of
from specdec.models.exchanged.linear import LastLinear
from specdec.models.exchanged.product import (
    MOST_ROWS,
    Norm,
    Product,
    added_product,
    deferred_norm,
    deferred_product,
    product,
)
from specdec.models.forward.cached_model import CachedModel
from support.captured import on_gpu
from support.feeding import feed
from support.model_types import model_of
from support.models import DECODER, prompts, tiny_model, tunable_pair
from support.native_layers import as_on_a_gpu, unhooked
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

# Of a forward through two layers: products with a norm before them, and with a sum after them.
WHOLE = (4, 4)
CASES = {
    "llama": WHOLE, "mistral": WHOLE, "qwen2": WHOLE, "qwen3": WHOLE, "smollm3": WHOLE, "phi3": WHOLE,
    "gemma2": (1, 0), "gemma3_text": (1, 0),  # whose branches end with norms, which go with those that follow them
    "qwen3_moe": (1, 2), "granitemoe": (1, 2),  # whose experts have norms and sums of their own
    "olmo2": (0, 0), "phi": (0, 0), "gpt_neox": (0, 0),
}  # fmt: skip
TREE = (-1, -1, 0, 1, 2, 2)


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    return as_on_a_gpu(monkeypatch)


@torch.inference_mode()
def logits_of(cached: CachedModel, count: int = 7) -> torch.Tensor:
    return feed(cached, cached.new_cache(1, 40), prompts(1, count, count))


@torch.inference_mode()
def own_logits(model: nn.Module) -> torch.Tensor:
    return model(torch.tensor(prompts(1, 7, 7))).logits


@torch.inference_mode()
def fed(cached: CachedModel) -> list[torch.Tensor]:
    """The logits of ragged steps, of a tree, and of more tokens than the kernel takes."""
    cache, found = cached.new_cache(2, 80), []
    cached.prefill(cache, [prompts(1, n, n, seed=n)[0] for n in (5, 20)])
    for step, counts in enumerate(((1, 1), (3, 1), (5, 5), (9, 9), (1, 2))):
        new = [prompts(1, n, n, seed=100 * step + n)[0] for n in counts]
        found += [logits[:n] for logits, n in zip(feed(cached, cache, new), counts, strict=True)]
    return found


@torch.inference_mode()
def of_tree(cached: CachedModel) -> list[torch.Tensor]:
    """The logits of a tree, of which a path is kept, and of what follows it."""
    tree, cache = Tree.of(torch.tensor(TREE)), cached.new_cache(2, 60)
    cached.prefill(cache, [prompts(1, n, n, seed=n)[0] for n in (4, 24)])
    valid = torch.arange(7) <= torch.tensor([[6], [4]])
    places = tree.places(cache.lengths, valid, cache.trash)
    logits = cached(
        torch.tensor([prompts(1, 7, 7, seed=i)[0] for i in (0, 1)]), cache, cached.layout(*places, 40, tree)
    )
    cache.compact(torch.tensor([[1, 3], [0, 2]]))
    cache.lengths = cache.lengths + 3
    return [*logits[valid], *feed(cached, cache, [[1, 2], [3, 4]])]


def transformers_own(model: nn.Module) -> CachedModel:
    """The model's own modules, with nothing exchanged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_NATIVE", "0")
        return CachedModel(model, attention="model")


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, calls):
    model = unhooked(model_of(case))
    expected, cached = fed(transformers_own(model)), CachedModel(copy.deepcopy(model), attention="model")
    calls.clear()
    for own, its in zip(fed(cached), expected, strict=True):
        torch.testing.assert_close(own, its, rtol=1e-4, atol=5e-5)
    forwards = 5  # of few tokens: four of the steps, and the first one, which tells the shapes of keys and values
    assert (calls["norm_linear"] / forwards, calls["add_linear"] / forwards) == CASES[case]
    for own, its in zip(of_tree(cached), of_tree(transformers_own(model)), strict=True):
        torch.testing.assert_close(own, its, rtol=1e-4, atol=5e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles, and interprets nothing")
@pytest.mark.parametrize("case", ["llama", "qwen2", "gemma2"])
def test_errors_of_half_precision(case, calls):
    """No larger than those of transformers' own modules, against a forward in float32."""
    model = unhooked(model_of(case)).half()
    exact = fed(transformers_own(copy.deepcopy(model).float()))
    errors = []
    for cached in (CachedModel(copy.deepcopy(model), attention="model"), transformers_own(model)):
        errors.append(torch.cat([(a - b).flatten() for a, b in zip(fed(cached), exact, strict=True)]).norm())
    assert calls["norm_linear"] and 0 < errors[0] <= 1.1 * errors[1]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_texts_are_those_of_transformers(kind, drafts, batch, calls):
    target, draft = (copy.deepcopy(tiny_model(kind, seed)) for seed in (0, 1))
    texts, options = prompts(batch, 3, 9), {"max_new_tokens": 12, "eos_token_id": []}
    found = SpeculativeDecoder(target, draft if drafts else None, drafts).generate(texts, **options).tokens
    assert calls["norm_linear"] and bool(calls["add_linear"]) == (kind != "gemma3")
    for text, own in zip(texts, found, strict=True):
        ids = torch.tensor([text])
        its = tiny_model(kind).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
        assert own == its[0, len(text) :].tolist()


def test_more_tokens_go_as_before(calls):
    cached = CachedModel(copy.deepcopy(tiny_model()), attention="model")
    logits_of(cached)
    for count in (MOST_ROWS, MOST_ROWS + 1):
        calls.clear()
        logits_of(cached, count)
        own = calls["norm_linear"], calls["add_linear"], calls["add_rms_norm"], calls["gated"]
        assert own == ((4, 4, 0, 0) if count == MOST_ROWS else (0, 0, 4, 2))


@on_gpu
@torch.inference_mode()
def test_errors_on_a_gpu(monkeypatch):
    """Of the kernel itself, in bfloat16."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 2}
    model, called, own = LlamaForCausalLM(LlamaConfig(**{**DECODER, **sizes})).eval(), [], on_the_way.norm_linear
    monkeypatch.setattr(on_the_way, "norm_linear", lambda *a, **b: called.append(a) or own(*a, **b))
    half = copy.deepcopy(model).to("cuda", torch.bfloat16)
    steps, tokens = CachedModel(half, attention="model").steps, torch.tensor(prompts(2, 5, 5)).cuda()
    exact, its, found = (m(tokens, use_cache=False).logits.float() for m in (model.cuda(), half, steps))
    assert len(called) == 4 and 0 < (found - exact).norm() <= 1.2 * (its - exact).norm()


# ---- Who else there is


def assert_same(cached: CachedModel) -> None:
    torch.testing.assert_close(logits_of(cached), own_logits(cached.model), atol=2e-5, rtol=1e-4)


def in_place(module, args, kwargs, *output):
    """Changes what a module returns, or what it is given."""
    for own in (output[0] if isinstance(output[0], tuple) else output) if output else (*args, *kwargs.values()):
        if isinstance(own, torch.Tensor) and own.is_floating_point() and own.dim() == 3:
            own[..., ::3].mul_(3)


PLACES = [
    "model.layers.0", "model.layers.1", "model.layers.1.input_layernorm", "model.layers.0.post_attention_layernorm",
    "model.layers.0.self_attn", "model.layers.1.mlp", "model.norm", "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.down_proj",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("before", [False, True])
def test_hooks_change_what_they_are_given(place, before, calls):
    """Added before a model is taken, and after."""
    model = copy.deepcopy(tiny_model())
    without, cached = own_logits(model), CachedModel(model, attention="model")
    module = model.get_submodule(place)
    (module.register_forward_pre_hook if before else module.register_forward_hook)(in_place, with_kwargs=True)
    assert not torch.allclose(without, own_logits(model), atol=1e-3)
    assert_same(cached)
    assert_same(CachedModel(model, attention="model"))


class Other(nn.Linear):
    """What is no layer of ours, and may read numbers in a way of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert type(x) is torch.Tensor
        return F.linear(x, self.weight)


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_layers_of_other_kinds_get_what_is_computed(name, calls):
    model = copy.deepcopy(tiny_model())
    model.model.layers[1].get_submodule(name).__class__ = Other
    calls.clear()
    assert_same(CachedModel(model, attention="model"))
    # Of two forwards. A sum that is left to the norm behind it leaves no norm to the products.
    assert calls["norm_linear"] == 2 * (2 if "attn" in name else 3) and calls["add_linear"] == 2 * 3


def test_weights_that_were_replaced(calls):
    model = copy.deepcopy(tiny_model())
    cached = CachedModel(model, attention="model")
    layer = model.model.layers[0]
    for own in (layer.mlp.up_proj, layer.self_attn.v_proj, layer.mlp.down_proj):
        own.weight.data = own.weight.detach() * 1.5
    assert_same(cached)
    layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.detach() * 1.5  # and again, in the middle of a text
    torch.testing.assert_close(own_logits(cached.forwards.steps), own_logits(model), atol=2e-5, rtol=1e-4)


def test_adapters(calls):
    peft = pytest.importorskip("peft")
    target, draft = tunable_pair(0.3)
    for names in (["q_proj"], ["down_proj", "gate_proj"]):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=names, r=4, init_lora_weights=False)
        model = peft.get_peft_model(copy.deepcopy(target), config).eval()
        text = prompts(1, 9, 9)
        found = SpeculativeDecoder(model, draft, 3).generate(text, max_new_tokens=10, eos_token_id=[]).tokens
        own = model.generate(input_ids=torch.tensor(text), do_sample=False, max_new_tokens=10, pad_token_id=0)
        assert found[0] == own[0, 9:].tolist() and calls["norm_linear"]
        calls.clear()


def test_it_can_be_switched_off(calls, monkeypatch):
    monkeypatch.setenv("SPECDEC_NATIVE", "0")
    assert_same(CachedModel(copy.deepcopy(tiny_model()), attention="model"))
    assert not calls


def test_autocast_and_gradients_are_pytorchs(calls):
    cached = CachedModel(copy.deepcopy(tiny_model()), attention="model")
    tokens = torch.tensor(prompts(1, 7, 7))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert cached.forwards.steps(tokens).logits.dtype == torch.bfloat16
    cached.forwards.steps(tokens).logits.sum().backward()
    assert cached.model.model.layers[0].mlp.up_proj.weight.grad is not None
    assert not any(calls[name] for name in ("norm_linear", "add_linear", "linear"))


# ---- What is deferred


@torch.inference_mode()
def test_a_deferred_product_is_what_anyone_reads(calls):
    x, weight, base = torch.randn(2, 3, 32), torch.randn(8, 32), torch.randn(2, 3, 8)
    made = deferred_product(x, weight, None)
    assert isinstance(source_of(made), Product) and made.shape == base.shape and not calls
    torch.testing.assert_close(added_product(base, made), base + F.linear(x, weight))
    assert calls == {"add_linear": 1}
    assert torch.equal(made + 0, F.linear(x, weight)) and calls == {"add_linear": 1, "linear": 1}
    made.mul_(2)  # and then it is no product any more
    assert source_of(made) is None and added_product(base, made) is None
    assert torch.equal(base + made, base + 2 * F.linear(x, weight))
    assert added_product(base[:1], deferred_product(x, weight, None)) is None  # which would be spread over rows
    many = deferred_product(x.repeat(3, 1, 1), weight, None)
    assert type(many) is torch.Tensor


@torch.inference_mode()
def test_a_deferred_norm_is_what_anyone_reads(calls):
    x, norm, weight, made = torch.randn(2, 3, 32), torch.randn(32), torch.randn(8, 32), []

    def compute() -> torch.Tensor:
        made.append(F.rms_norm(x, (32,), norm, 1e-6))
        return made[-1]

    normed = deferred_norm(x, norm, 1e-6, {}, compute)
    assert isinstance(source_of(normed), Norm) and isinstance(normed, Deferred)
    expected = F.linear(F.rms_norm(x, (32,), norm, 1e-6), weight)
    torch.testing.assert_close(product(normed, weight, None), expected)
    assert not made and calls == {"norm_linear": 1}
    normed[..., 0] = 0
    assert len(made) == 1 and computed(normed) is made[0] and made[0][0, 0, 0] == 0
    torch.testing.assert_close(product(normed, weight, None), F.linear(made[0], weight))
    assert calls == {"norm_linear": 1, "linear": 1} and len(made) == 1


def test_what_ends_a_branch_is_known(calls):
    cached = CachedModel(copy.deepcopy(tiny_model()), attention="model")
    last = [name for name, module in cached.forwards.steps.named_modules() if isinstance(module, LastLinear)]
    assert [name.rpartition(".")[2] for name in last] == ["o_proj", "down_proj"] * 2
    assert not any(isinstance(module, LastLinear) for module in cached.model.modules())
