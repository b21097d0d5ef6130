"""Linear layers of our own: which layers of a model become such, and that the model itself stays as it is."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from specdec import SpeculativeDecoder
from specdec.models.exchanged import linear as module
from specdec.models.exchanged.beside import Beside
from specdec.models.exchanged.linear import NativeLinear, with_native_linear
from support.model_types import model_of
from support.models import tunable_pair
from torch import nn


@pytest.fixture
def model():
    return copy.deepcopy(tunable_pair(0.3)[0])


def kinds(model: nn.Module) -> set[type]:
    return {type(m) for m in model.modules() if isinstance(m, nn.Linear)}


def logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(tokens, use_cache=False).logits


def test_a_copy_has_them_and_shares_the_weights(model):
    before = dict(model.named_modules())
    fast = with_native_linear(model)
    assert kinds(fast) == {NativeLinear} and kinds(model) == {nn.Linear}
    assert dict(model.named_modules()) == before and fast.get_output_embeddings() is fast.lm_head
    pairs = zip(model.named_parameters(), fast.named_parameters(), strict=True)
    assert all(mine == its and mine[1] is its[1] for mine, its in pairs)
    tokens = torch.arange(4)[None]
    torch.testing.assert_close(logits(fast, tokens), logits(model, tokens), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    torch.testing.assert_close(logits(fast, tokens), logits(model, tokens), rtol=1e-4, atol=1e-4)


def test_steps_and_prompts_go_through_them(model, monkeypatch):
    rows = []

    def spy(x, weight, bias, _):
        rows.append(x.shape[0] * x.shape[1])
        return nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(module, "linear", spy)
    SpeculativeDecoder(model, model, 3).generate([list(range(1, 18))], max_new_tokens=9)
    # The draft and the target read all but the last one or two; then there is what the draft is fed after a step.
    assert {1, 4} <= {r for r in rows if r < 15} <= {1, 2, 3, 4} and 16 in rows


def test_what_goes_through_them(monkeypatch):
    layer = with_native_linear(nn.Linear(6, 3))
    assert type(layer) is NativeLinear
    called = []

    def spy(x, *rest):
        called.append(tuple(x.shape))
        return nn.functional.linear(x, *rest[:2])

    monkeypatch.setattr(module, "linear", spy)
    with torch.inference_mode():
        for shape in ((1, 4), (2, 30), (0, 3), (5,), (), (2, 2, 2)):
            assert layer(torch.ones(*shape, 6)).shape == (*shape, 3)
        assert called == [(1, 4, 6), (2, 30, 6), (0, 3, 6), (1, 5, 6), (1, 1, 6), (1, 8, 6)]
        called.clear()
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.ones(1, 2, 6)).dtype == torch.bfloat16
        with pytest.raises(RuntimeError):
            layer(torch.ones(1, 2, 6).bfloat16())
    layer(torch.ones(1, 2, 6)).sum().backward()
    assert not called and layer.weight.grad is not None


class Own(nn.Linear):
    pass


def test_other_layers_stay(model):
    replaced = nn.Linear(4, 4)
    replaced.forward = lambda x: x
    for other in (Own(4, 4), replaced, nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4, device="meta")):
        assert with_native_linear(other) is other
        assert type(with_native_linear(nn.Sequential(other, nn.Linear(4, 4)))[1]) is NativeLinear
    assert with_native_linear(model.bfloat16()) is model


def test_hooks_run_and_shared_layers_stay_shared():
    layer, seen = nn.Linear(4, 4), []
    layer.register_forward_hook(lambda *_: seen.append(1))
    fast = with_native_linear(nn.Sequential(layer, layer))
    assert fast[0] is fast[1]
    with torch.inference_mode():
        fast(torch.ones(1, 1, 4))
    assert seen == [1, 1]


def test_the_inside_of_adapters_stays(model):
    """Which of them is active may change after the copy was made."""
    peft = pytest.importorskip("peft")
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False))
    fast, tokens = with_native_linear(model), torch.arange(4)[None]
    q, mine = fast.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.q_proj
    assert q is mine and type(fast.model.layers[0].mlp.up_proj) is NativeLinear
    torch.testing.assert_close(logits(fast, tokens), logits(model, tokens), rtol=1e-4, atol=1e-4)
    active = logits(fast, tokens)
    model.disable_adapters()
    torch.testing.assert_close(logits(fast, tokens), logits(model, tokens), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(fast, tokens), active, atol=1e-3)


def test_without_native_code_nothing_changes(model, monkeypatch):
    monkeypatch.setattr(module, "has_native", lambda: False)
    assert with_native_linear(model) is model


def test_layers_beside_each_other_are_computed_together(model, monkeypatch):
    """With the bits of each by itself; nothing is kept, and another input gets its own results."""
    calls = []
    joined = module.linears
    monkeypatch.setattr(module, "linears", lambda x, *rest: calls.append(x.shape) or joined(x, *rest))
    fast, apart = with_native_linear(model), with_native_linear(model)
    for layer in apart.modules():
        vars(layer).pop("beside", None)
    tokens = torch.arange(4)[None]
    assert torch.equal(logits(fast, tokens), logits(apart, tokens))
    assert len(calls) == 2 * len(fast.model.layers)
    attention, plain = fast.model.layers[0].self_attn, apart.model.layers[0].self_attn
    a, b = torch.randn(2, 1, 3, model.config.hidden_size)
    with torch.inference_mode():
        asked = (
            ("q_proj", a),
            ("k_proj", a),
            ("k_proj", b),
            ("v_proj", a),
            ("v_proj", a),
            ("q_proj", b),
            ("q_proj", a),
        )
        for name, x in asked:
            assert torch.equal(getattr(attention, name)(x), getattr(plain, name)(x)), name
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(attention, name)(b)
    assert not vars(attention.q_proj)["beside"]._open


def test_texts_on_two_threads_do_not_take_each_others_results():
    """Whenever one of them is interrupted, which here is after nearly every operation of Python."""
    layers = [nn.Linear(1, 1) for _ in range(2)]
    beside = Beside(layers, lambda x: (x + 1, x + 2))

    def work(x: torch.Tensor) -> int:
        return sum(int(beside.take(layer, x)) == int(x) + i for _ in range(1000) for i, layer in enumerate(layers, 1))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = [*threads.map(work, torch.arange(0, 400, 100))]
    finally:
        sys.setswitchinterval(interval)
    assert found == [2000] * 4 and not beside._open


def test_layers_of_other_inputs_are_not_joined():
    class Across(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 4), nn.Linear(6, 4), nn.Linear(6, 4)

    assert not any("beside" in vars(m) for m in with_native_linear(Across()).modules())


@pytest.mark.parametrize(("case", "alone"), [("llama", True), ("mixtral", False)])
def test_native_layers_have_the_threads_for_themselves(case, alone):
    """Experts are multiplied by PyTorch, which needs its threads there."""
    model, found, before = copy.deepcopy(model_of(case)), set[int](), torch.get_num_threads()
    model.get_input_embeddings().register_forward_hook(lambda *_: found.add(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        SpeculativeDecoder(model, None, 0).generate([[1, 2, 3]], max_new_tokens=3)
        assert found == {1 if alone else 2} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
