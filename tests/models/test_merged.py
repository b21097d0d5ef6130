"""Layers beside each other as one product, which is for GPUs, and here forced on a CPU: the caller's model keeps its
parameters, with their numbers, and nothing that is changed later is missed."""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch
from safetensors.torch import load_file
from specdec import SpeculativeDecoder
from specdec.models.exchanged import merged as module
from specdec.models.exchanged.beside import all_beside
from specdec.models.exchanged.merged import MergedLinear, is_merged_as_before, with_merged
from specdec.models.forward.cached_model import CachedModel
from support.captured import on_gpu
from support.feeding import assert_rows, feed
from support.model_types import CASES, model_of
from support.models import prompts, tiny_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

TOKENS = torch.tensor(prompts(1, 9, 9))
# What has its layers beside each other in one already, or under other names.
NOT_BESIDE = {
    "bloom", "falcon", "falcon, ALiBi", "gpt2", "gpt_bigcode", "gpt_neox", "mamba2", "mpt", "phi3",
}  # fmt: skip

merged = functools.partial(with_merged, device="cpu")


@pytest.fixture
def model():
    return copy.deepcopy(tiny_model("llama"))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Models on a CPU get what a GPU's get."""
    monkeypatch.setattr("specdec.models.forward.forwards.with_native_linear", lambda model: model)
    monkeypatch.setattr("specdec.models.forward.forwards.with_merged", merged)


@pytest.fixture
def products(monkeypatch):
    """The shapes of the products that are computed."""
    made, own = [], F.linear
    monkeypatch.setattr(F, "linear", lambda x, weight, *rest: made.append(tuple(weight.shape)) or own(x, weight, *rest))
    return made


def logits(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS.to(model.device), use_cache=False).logits


def attention_of(model: nn.Module) -> nn.Module:
    return model.model.layers[0].self_attn


def assert_same(fast: nn.Module, model: nn.Module) -> None:
    torch.testing.assert_close(logits(fast), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_every_type_computes_the_same(case):
    """And what is beside each other is called with the same tensor, so that nothing is computed twice."""
    model = copy.deepcopy(model_of(case))
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    modules, expected = dict(model.named_modules()), logits(model)
    fast, count = merged(model), 0
    assert torch.equal(logits(model), expected) and dict(model.named_modules()) == modules
    assert all(id(p) == before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters())
    for beside in all_beside(fast):

        def compute(x, own=beside.compute):
            nonlocal count
            count += 1
            return own(x)

        beside.compute = compute
    torch.testing.assert_close(logits(fast), expected, rtol=1e-4, atol=1e-5)
    groups = [b for b in all_beside(fast) if not any(b.layers[0] is m for m in sights(fast))]
    assert count == len(groups) and (count > 0) == (case not in NOT_BESIDE)
    assert not any(beside._open for beside in groups)


def sights(model: nn.Module) -> list[nn.Module]:
    """What reads images, which texts do without."""
    return [m for name, part in model.named_modules() if "vision" in name for m in part.modules()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama", "qwen2", "gemma2"])
def test_parts_of_a_product_are_views(case, dtype, products):
    """With biases (qwen2) or without."""
    model = copy.deepcopy(model_of(case)).to(dtype)
    fast, own, mlp = merged(model), attention_of(model), model.model.layers[0].mlp
    x = torch.randn(2, 3, own.q_proj.in_features).to(dtype)
    found = attention_of(fast)
    for names, layers, plain in (
        (("q_proj", "k_proj", "v_proj"), found, own),
        (("gate_proj", "up_proj"), fast.model.layers[0].mlp, mlp),
    ):
        products.clear()
        with torch.inference_mode():
            parts = [getattr(layers, name)(x) for name in names]
            assert products == [(sum(part.shape[2] for part in parts), x.shape[2])]
            assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
            for name, part in zip(names, parts, strict=True):
                torch.testing.assert_close(part, getattr(plain, name)(x), rtol=2e-2, atol=2e-3)


def test_weights_are_not_there_twice(model, monkeypatch):
    """One group after the other: what a group left is free before the next one is moved."""
    layer, own, left = model.model.layers[0], module.Whole, []
    linears = [m for m in layer.modules() if isinstance(m, nn.Linear)]
    storages = {id(m.weight): StorageWeakRef(m.weight.untyped_storage()) for m in linears}

    def whole(parts):
        left.append(sum(storage.expired() for storage in storages.values()))
        return own(parts)

    monkeypatch.setattr(module, "Whole", whole)
    fast, attention = merged(model), layer.self_attn
    assert left[:2] == [0, 3] and sum(storage.expired() for storage in storages.values()) == 5
    weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert [w.data_ptr() - weights[0].data_ptr() for w in weights] == [
        0, weights[0].nbytes, weights[0].nbytes + weights[1].nbytes
    ]  # fmt: skip
    assert attention_of(fast).q_proj.weight is attention.q_proj.weight


def test_files_are_the_same(model, tmp_path):
    """Those who save models look for tensors that share a storage: transformers copies them, accelerate leaves out all
    but the first, and torch writes the whole storage."""
    accelerate = pytest.importorskip("accelerate")
    model.save_pretrained(tmp_path / "before")
    stored = io.BytesIO()
    torch.save(attention_of(model).k_proj.state_dict(), stored)
    fast = merged(model)
    model.save_pretrained(tmp_path / "after")
    name = "model.safetensors"
    assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path / "accelerate")
    kept = load_file(tmp_path / "accelerate" / name)
    assert {*model.state_dict()} - {*kept} <= {"lm_head.weight"} and is_merged_as_before(fast)
    again = io.BytesIO()
    torch.save(attention_of(model).k_proj.state_dict(), again)
    assert len(again.getvalue()) == len(stored.getvalue())
    assert_same(merged(type(model).from_pretrained(tmp_path / "after")), model)
    assert_same(copy.deepcopy(fast), model)


def test_what_is_changed_in_place_is_seen(model, products):
    fast = merged(model)
    other = copy.deepcopy(tiny_model("llama", 1))
    model.load_state_dict(other.state_dict())
    assert_same(fast, other)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.allclose(logits(model), logits(other), atol=1e-2)
    expected = logits(model)
    products.clear()
    torch.testing.assert_close(logits(fast), expected, rtol=1e-4, atol=1e-5)
    assert is_merged_as_before(fast) and len(products) == 4 * len(model.model.layers) + 1


def test_gradients_are_those_of_the_parameters(model):
    fast = merged(model)
    model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    own = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    fast(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, own[name])


def set_data(model):
    weight = attention_of(model).k_proj.weight
    weight.data = weight.detach() * 2


def overlapping(model):
    """At the same address, but with other numbers."""
    weight = attention_of(model).k_proj.weight
    weight.data = torch.as_strided(weight.detach(), weight.shape, (0, 1))


def another_parameter(model):
    attention_of(model).v_proj.weight = nn.Parameter(torch.randn_like(attention_of(model).v_proj.weight))


def another_dtype(model):
    model.double()


def another_bias(model):
    attention_of(model).q_proj.bias.data = attention_of(model).q_proj.bias.detach() + 1


CHANGES = [set_data, overlapping, another_parameter, another_dtype, another_bias]


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_went_elsewhere_are_noticed(change):
    """By the next forward, which computes each layer by itself, and those that follow merge them again."""
    model = copy.deepcopy(model_of("qwen2"))
    fast = merged(model)
    change(model)
    assert not is_merged_as_before(fast)
    assert_same(fast, model)
    again = merged(model)
    assert_same(again, model)
    assert is_merged_as_before(again)
    # Rows that overlap are left alone.
    assert len(all_beside(again)) == 2 * len(model.model.layers) - (change is overlapping)


@pytest.mark.parametrize("change", [set_data, another_parameter, another_bias])
def test_the_next_text_is_merged_again(change, as_on_a_gpu):
    model = copy.deepcopy(model_of("qwen2"))
    cached = CachedModel(model)
    cached.new_cache(1, 20)
    before = cached.forwards.steps
    assert len(all_beside(before)) == 2 * len(model.model.layers) and cached.forwards.steps is before
    cached.new_cache(1, 20)
    assert cached.forwards.steps is before
    change(model)
    text = prompts(1, 9, 9)
    with torch.inference_mode():
        found = feed(cached, cached.new_cache(1, 20), text)
    assert cached.forwards.steps is not before and is_merged_as_before(cached.forwards.steps)
    assert_rows(model, found, [[]], text)


def test_decoders_of_a_model_share_what_was_merged(model):
    first = merged(model)
    place = attention_of(model).q_proj.weight.data_ptr()
    second = merged(model)
    assert attention_of(model).q_proj.weight.data_ptr() == place
    assert is_merged_as_before(first) and is_merged_as_before(second)
    wholes = [vars(attention_of(fast).q_proj)["beside"].compute.weight for fast in (first, second)]
    assert wholes[0] is wholes[1]


def test_texts_are_the_same(as_on_a_gpu):
    target, draft = (copy.deepcopy(tiny_model("llama", seed)) for seed in (0, 1))
    expected = SpeculativeDecoder(tiny_model("llama"), tiny_model("llama", 1), 3)
    own, texts = SpeculativeDecoder(target, draft, 3), prompts(3, 4, 9)
    for _ in range(2):
        given = {"max_new_tokens": 12, "eos_token_id": []}
        assert own.generate(texts, **given).tokens == expected.generate(texts, **given).tokens


def kept(model: nn.Module) -> set[str]:
    """The layers of the first decoder layer that stay as they are."""
    layers = merged(model).model.layers[0].named_modules()
    return {name.split(".")[1] for name, m in layers if name.count(".") == 1 and not isinstance(m, MergedLinear)}


QKV, GATED = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}


def adapter(model):
    peft = pytest.importorskip("peft")
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False))


def parametrised(model):
    nn.utils.parametrizations.weight_norm(attention_of(model).k_proj)


def hooked_before(model):
    """As tensor parallelism and offloading prepare inputs."""
    attention_of(model).k_proj.register_forward_pre_hook(lambda module, given: (given[0] + 1,))


def another_class(model):
    class Own(nn.Linear):
        pass

    attention_of(model).v_proj.__class__ = Own


def another_forward(model):
    layer = attention_of(model).v_proj
    layer.forward = functools.partial(F.linear, weight=layer.weight)


def one_bias(model):
    attention_of(model).v_proj.bias = nn.Parameter(torch.ones(attention_of(model).v_proj.out_features))


def two_dtypes(model):
    attention_of(model).v_proj.bfloat16()


def tied(model):
    attention_of(model).v_proj.weight = attention_of(model).k_proj.weight


def tied_to_another_layer(model):
    model.model.layers[1].self_attn.v_proj.weight = attention_of(model).v_proj.weight


def the_same_memory(model):
    attention_of(model).v_proj.weight.data = attention_of(model).k_proj.weight.data


def a_part_of_more(model):
    whole = torch.cat([attention_of(model).v_proj.weight.detach()] * 2)
    attention_of(model).v_proj.weight.data = whole[: len(whole) // 2]


def shared_with_processes(model):
    attention_of(model).v_proj.weight.data.share_memory_()


def hooked(model):
    accelerate = pytest.importorskip("accelerate")
    accelerate.hooks.add_hook_to_module(attention_of(model).v_proj, accelerate.hooks.ModelHook())


def quantised(model):
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(attention_of(model), torchao.Int8WeightOnlyConfig())


@pytest.mark.parametrize(
    "change",
    [
        adapter, parametrised, hooked_before, another_class, another_forward, one_bias, two_dtypes, tied,
        tied_to_another_layer, the_same_memory, a_part_of_more, shared_with_processes, hooked, quantised,
    ],
)  # fmt: skip
def test_what_is_left_alone(change, model):
    assert not kept(copy.deepcopy(model)) & (QKV | GATED)
    change(model)
    left = kept(model)
    assert QKV <= left and not left & GATED
    if change is not two_dtypes:
        assert_same(merged(model), model)


def test_an_active_adapter_acts(model):
    peft = pytest.importorskip("peft")
    plain, config = logits(model), peft.LoraConfig(target_modules=["up_proj"], r=4, init_lora_weights=False)
    merged(model)
    model.add_adapter(config)
    model.eval()
    assert not torch.allclose(logits(merged(model)), plain, atol=1e-3)
    assert_same(merged(model), model)


def test_what_is_not_there(model):
    other = model_of("gpt_neox")
    assert merged(other) is other
    assert with_merged(model) is model  # which is on a CPU


def test_it_can_be_switched_off(model, monkeypatch):
    monkeypatch.setenv("SPECDEC_NATIVE", "0")
    assert merged(model) is model
    monkeypatch.setenv("SPECDEC_NATIVE", "no")
    with pytest.raises(ValueError, match="^SPECDEC_NATIVE: got 'no', allowed: '0' or '1'"):
        merged(model)
    monkeypatch.setenv("SPECDEC_NATIVE", "1")
    assert merged(model) is not model


def test_where_memory_runs_out_the_rest_stays(model, monkeypatch):
    own, calls = module.Whole, []

    def whole(parts):
        calls.append(parts)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("full")
        return own(parts)

    monkeypatch.setattr(module, "Whole", whole)
    fast = merged(model)
    assert len(all_beside(fast)) == 1 and len(calls) == 2
    assert_same(fast, model)

    def broken(parts):
        raise RuntimeError("something else")

    monkeypatch.setattr(module, "Whole", broken)
    with pytest.raises(RuntimeError, match="something else"):
        merged(copy.deepcopy(model))


def test_models_that_were_made_under_inference_mode():
    with torch.inference_mode():
        model = copy.deepcopy(tiny_model("llama"))
    assert_same(merged(model), tiny_model("llama"))


def test_autocast_is_that_of_the_layers(model):
    fast = merged(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(fast), logits(model))


@on_gpu
def test_on_a_gpu(tmp_path):
    model = copy.deepcopy(tiny_model("llama")).to("cuda", torch.bfloat16)
    before, expected = torch.cuda.memory_allocated(), logits(model)
    fast = with_merged(model)
    assert len(all_beside(fast)) == 2 * len(model.model.layers)
    assert abs(torch.cuda.memory_allocated() - before) < 4096 * len(list(model.parameters()))
    found = logits(fast)
    assert (found - expected).abs().max() <= 0.02 * expected.abs().max()
    model.save_pretrained(tmp_path)
    model.to("cpu")
    assert not is_merged_as_before(fast)
