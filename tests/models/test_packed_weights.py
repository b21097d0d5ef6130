"""Models of packed weights: the float32 model that has these weights, but for the rounding of inputs to 16 bits, in a
quarter of the bytes; and the same bits for any number of tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from specdec import PromptLookupDrafter, SpeculativeDecoder, load_embedded_pair, load_model, load_pair
from specdec.drafters.heads.vocabulary import has_scale, target_embedding, target_head
from specdec.models.exchanged.linear import NativeLinear, with_native_linear
from specdec.models.exchanged.packed_weights import (
    PackedEmbedding,
    PackedLinear,
    is_packed,
    num_parameters,
    pack,
    rows_of,
)
from specdec.models.exchanged.stored_weights import pack_weights
from specdec.models.load import loading, plan
from specdec.models.load.location import Location
from specdec.models.load.reduced_head import reduce_head
from specdec.models.load.saved_model import read_saved
from specdec_layers import Packing, interleave, quantise, stored_rows
from support.model_types import model_of
from support.models import prompts
from torch import nn

# Tied and own heads; a scaled embedding; biases; experts; states; layers that are no nn.Linear.
CASES = ("llama", "llama, tied", "qwen2", "gemma3_text", "mixtral", "nemotron_h", "gpt2", "qwen3_5_text")


def numbers_of(module: nn.Module) -> torch.Tensor:
    return stored_rows(module.weight, torch.arange(len(module.weight)), module.packing)


def packed(model: nn.Module, packing: Packing = Packing.Q8_0) -> tuple[nn.Module, nn.Module]:
    """A model of packed weights, and the float32 model of the numbers that they stand for."""
    own, twin = copy.deepcopy(model), copy.deepcopy(model).float()
    pack_weights(own, packing)
    for mine, its in zip(own.modules(), twin.modules(), strict=True):
        if is_packed(mine):
            with torch.no_grad():
                its.weight.copy_(numbers_of(mine))
    return own, twin


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return with_native_linear(model)(ids, use_cache=False).logits


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_the_model_of_these_numbers(case, dtype):
    own, twin = packed(copy.deepcopy(model_of(case)).to(dtype))
    assert any(is_packed(m) for m in own.modules()) and own.dtype == torch.float32
    assert {p.dtype for p in own.parameters()} <= {torch.float32, torch.uint8, dtype}
    assert num_parameters(own) == num_parameters(twin) == sum(p.numel() for p in twin.parameters())
    ids = torch.arange(11)[None]
    whole, exact = logits(own, ids), logits(twin, ids)
    near = {"rtol": 0, "atol": 6e-3 * exact.abs().max().item()}  # a part of 2**-16 of each input, through all layers
    torch.testing.assert_close(whole, exact, **near)
    assert not torch.equal(whole, exact)
    for tokens in (1, 3):
        torch.testing.assert_close(logits(own, ids[:, :tokens]), whole[:, :tokens], **near)
    table, embedded = own.get_input_embeddings(), twin.get_input_embeddings()(ids)
    assert torch.equal(table(ids), embedded) and torch.equal(table(ids.int()), embedded)


def test_the_text_is_that_of_plain_decoding():
    target, _ = packed(model_of("llama"))
    draft, _ = packed(model_of("llama"), Packing.Q4_0)
    for asked in prompts(3, 2, 20):
        plain = SpeculativeDecoder(target, None, 0).generate([asked], max_new_tokens=12).tokens
        for drafter in (draft, PromptLookupDrafter()):
            assert SpeculativeDecoder(target, drafter, 3).generate([asked], max_new_tokens=12).tokens == plain


def test_one_copy_of_the_weights():
    own, _ = packed(model_of("llama, tied"))
    assert own.get_input_embeddings().weight is own.get_output_embeddings().weight
    assert isinstance(own.get_input_embeddings(), PackedEmbedding) and isinstance(own.lm_head, PackedLinear)
    fast = with_native_linear(own)
    assert fast.lm_head is not own.lm_head and fast.lm_head.weight is own.lm_head.weight
    assert not any("beside" in vars(m) for m in own.modules()) and any("beside" in vars(m) for m in fast.modules())
    matrices = [p for p in own.parameters() if p.dtype == torch.uint8]
    assert sum(p.nbytes for p in matrices) * 32 == 34 * (
        num_parameters(own) - sum(p.numel() for p in own.parameters() if p.dtype != torch.uint8)
    )


def test_a_weight_that_is_shared_with_what_cannot_be_packed_stays():
    model = copy.deepcopy(model_of("llama, tied"))

    class Other(nn.Linear):
        pass

    model.lm_head.__class__ = Other
    pack_weights(model, Packing.Q8_0)
    assert model.get_input_embeddings().weight.dtype == torch.float32
    assert isinstance(model.model.layers[0].mlp.up_proj, PackedLinear)


def test_layers_of_several_packings_are_joined():
    """As those of one file, which stores values in more bits than queries and keys."""
    model, packings = copy.deepcopy(model_of("llama")), (Packing.Q8_0, Packing.Q4_0, Packing.Q8_0)
    attention = model.model.layers[0].self_attn
    for name, packing in zip(("q_proj", "k_proj", "v_proj"), packings, strict=True):
        layer = getattr(attention, name)
        pack(layer, interleave(quantise(layer.weight, packing)), packing)
    fast, x = with_native_linear(attention), torch.randn(1, 3, model.config.hidden_size)
    assert "beside" in vars(fast.q_proj)
    with torch.inference_mode():
        for name in ("q_proj", "k_proj", "v_proj"):
            layer = getattr(attention, name)
            assert torch.equal(getattr(fast, name)(x), layer(x))
            numbers = nn.functional.linear(x, numbers_of(layer), layer.bias)
            torch.testing.assert_close(layer(x), numbers, rtol=1e-3, atol=1e-4)


def test_gradients_and_other_dtypes():
    """As training a head, and the checks of near-ties in float64."""
    own, twin = packed(model_of("gemma3_text"))
    ids, wide = torch.arange(5)[None], copy.deepcopy(own).double()
    with torch.no_grad():
        assert torch.equal(wide(ids).logits, copy.deepcopy(twin).double()(ids).logits)
    layer, numbers = own.model.layers[0].mlp.up_proj, twin.model.layers[0].mlp.up_proj
    x = torch.randn(2, layer.in_features, requires_grad=True)
    layer(x).sum().backward()
    mine, x.grad = x.grad, None
    numbers(x).sum().backward()
    assert torch.equal(mine, x.grad) and not layer.weight.requires_grad


def test_adapters():
    peft = pytest.importorskip("peft")
    own, twin = packed(model_of("llama"))
    torch.manual_seed(0)
    for model in (own, twin):
        torch.manual_seed(0)
        model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False))
        model.eval()
    ids = torch.arange(6)[None]
    torch.testing.assert_close(logits(own, ids), logits(twin, ids), rtol=0, atol=1e-3)
    assert SpeculativeDecoder(own, None, 0).generate([[1, 2, 3]], max_new_tokens=4).tokens


@pytest.mark.parametrize("case", ["llama", "gemma3_text"])
def test_what_heads_take_of_it(case):
    own, twin = packed(model_of(case))
    hidden, ids = own.config.hidden_size, torch.tensor([[1, 5, 7]])
    assert has_scale(own) == has_scale(twin) == (case == "gemma3_text")
    for scaled in (False, True):
        assert torch.equal(target_embedding(own, hidden, scaled)(ids), target_embedding(twin, hidden, scaled)(ids))
    x, d2t = torch.randn(1, 2, hidden), torch.tensor([0, 3, 9])
    assert torch.equal(target_head(own, hidden, d2t)(x), target_head(twin, hidden, d2t)(x))
    assert torch.equal(rows_of(own.lm_head, d2t), twin.lm_head.weight[d2t])
    with torch.inference_mode():
        torch.testing.assert_close(target_head(own, hidden)(x), target_head(twin, hidden)(x), rtol=0, atol=1e-3)
    with pytest.raises(ValueError, match=f"embed_tokens.weight: .*the target's has {hidden}"):
        target_embedding(own, hidden + 1)


def test_what_is_refused(tmp_path):
    own, _ = packed(model_of("llama"))
    with pytest.raises(ValueError, match="model: its weights are packed"):
        own.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())
    with pytest.raises(ValueError, match="vocabulary: .* a PackedLinear"):
        reduce_head(own, torch.arange(4))
    blocks = torch.zeros(3, 34, dtype=torch.uint8)
    for module, given, packing, name in (
        (nn.Conv1d(32, 3, 1), blocks, Packing.Q8_0, "module"),
        (own.lm_head, blocks, Packing.Q8_0, "module"),
        (nn.Linear(32, 3), blocks, Packing.NONE, "packing"),
        (nn.Linear(33, 3), blocks, Packing.Q8_0, "packing"),
        (nn.Linear(32, 3), blocks, Packing.Q4_K, "packing"),
        (nn.Linear(32, 3), blocks, Packing.Q4_0, "blocks"),
        (nn.Linear(32, 3), blocks.char(), Packing.Q8_0, "blocks"),
        (nn.Embedding(3, 32), torch.zeros(34, 3, dtype=torch.uint8).T, Packing.Q8_0, "blocks"),
    ):
        with pytest.raises(ValueError, match=f"{name}: got .*, allowed: "):
            pack(module, given, packing)


@pytest.fixture
def folder(tmp_path):
    copy.deepcopy(model_of("llama")).bfloat16().save_pretrained(tmp_path)
    return tmp_path


def test_loading(folder, monkeypatch):
    """Ours, whether bitsandbytes is there or not."""
    monkeypatch.setattr(loading, "by_bitsandbytes", None)
    model = load_model(folder, bits=8)
    for module in model.modules():  # those of no whole blocks stay stored as they were
        if isinstance(module, nn.Linear):
            assert type(module) is (NativeLinear if module.in_features % 32 else PackedLinear)
    assert isinstance(model.get_input_embeddings(), PackedEmbedding) and not model.training
    whole = load_model(folder)
    ids = torch.arange(6)[None]
    with torch.inference_mode():
        assert 0 < (model(ids).logits - whole(ids).logits).abs().max() < 0.05 * whole(ids).logits.abs().max()
    assert torch.equal(load_model(folder, "float32", bits=8)(ids).logits, model(ids).logits)
    target, draft, tokenizer = load_embedded_pair(bits=8)
    tokenizer.save_pretrained(folder)
    assert all(isinstance(m.lm_head, PackedLinear) for m in (target, draft, *load_pair(folder, folder, bits=8)[:2]))


def test_what_loading_refuses(folder, monkeypatch):
    for more, message in (
        ({"bits": 4}, "bits: got 4 on a CPU, allowed: 8 or None"),
        ({"bits": 8, "dtype": "bfloat16"}, "dtype: got bfloat16 with bits on a CPU, allowed: auto or float32"),
        ({"bits": 8, "dtype": torch.float64}, "dtype: got float64 with bits on a CPU, allowed: auto or float32"),
    ):
        with pytest.raises(ValueError, match=message):
            load_model(folder, **more)
    monkeypatch.setattr(plan, "has_native", lambda: False)
    with pytest.raises(ValueError, match="bits: got 8 on a CPU without native code"):
        load_model(folder, bits=8)


def test_bits_on_a_gpu_need_their_library(folder, monkeypatch):
    saved = read_saved(Location("path", folder))
    monkeypatch.setattr(plan.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="bits: got 8 without bitsandbytes, allowed: None, or: pip install"):
        plan.Plan(None, torch.device("cuda"), bits=8).check(saved)


def test_a_model_that_can_be_packed_in_part(tmp_path):
    """Conv1D of GPT-2 is no nn.Linear."""
    model_of("gpt2").save_pretrained(tmp_path)
    with pytest.warns(RuntimeWarning, match="bits: [0-9]+% of the model's parameters are packed"):
        model = load_model(tmp_path, bits=8)
    assert isinstance(model.lm_head, PackedLinear)
    config = copy.deepcopy(model_of("llama").config)
    config.hidden_size = config.intermediate_size = 24
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 3, 1, 8
    type(model_of("llama"))(config).save_pretrained(tmp_path / "narrow")
    with pytest.raises(ValueError, match="bits: got 8 for weights that are in no rows of whole blocks, allowed: None"):
        load_model(tmp_path / "narrow", bits=8)
    assert NativeLinear not in {type(m) for m in model.modules()}
