"""Models of a GPU with linear layers in 8 bits. Without a GPU, a CPU stands for it, and the kernel runs on fibers."""

from __future__ import annotations

import copy

import pytest
import simt.kernels
import torch
from specdec import SpeculativeDecoder, load_model
from specdec.drafters.heads.vocabulary import target_head
from specdec.models.exchanged import linear as layers
from specdec.models.exchanged import product as module
from specdec.models.exchanged.int8_linear import Int8Linear, can_be_int8, to_int8
from specdec.models.exchanged.linear import with_native_linear
from specdec.models.exchanged.merged import MergedInt8Linear, is_merged_as_before, with_merged
from specdec.models.exchanged.packed_weights import is_packed, num_parameters, rows_of, weight_of, width_of
from specdec.models.exchanged.product import MOST_ROWS, MOST_ROWS_INT8, product
from specdec.models.forward.cached_model import CachedModel
from specdec.models.load import few_bits, plan
from specdec.models.load.few_bits import round_weights
from specdec.models.native_report import native_report
from specdec_layers import Packing, linear, pack_int8, unpack_int8
from support.captured import on_gpu
from support.feeding import feed
from support.native_layers import as_on_a_gpu
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, int]]:
    """(rows, outputs) with which the kernel was called, if its weights were of 8 bits."""
    found: list[tuple[int, int]] = []

    def kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, packing: Packing) -> torch.Tensor:
        assert (packing == Packing.INT8) == (weight.dtype == torch.uint8)
        if packing == Packing.INT8:
            found.append((x.shape[0] * x.shape[1], len(weight)))
        if ON_GPU:
            return linear(x, weight, bias, packing)
        return simt.kernels.linear(x.flatten(0, 1), weight, bias).view(*x.shape[:2], len(weight))

    monkeypatch.setattr(module, "linear", kernel)
    if not ON_GPU:
        for each in (module, plan):
            monkeypatch.setattr(each, "has_kernel", lambda: True)
        for each in (module, layers):
            monkeypatch.setattr(each, "DEVICE", "cpu")
        for each in (few_bits, plan):
            monkeypatch.setattr(each, "is_cpu", lambda _: False)
    return found


def tiny(tied: bool = False, inner: int = 128, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": inner, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=96,
        max_position_embeddings=256,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        eos_token_id=None,
        **sizes,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def rounded(model: LlamaForCausalLM) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A model in 8 bits, and the one of the numbers that they stand for."""
    own = round_weights(copy.deepcopy(model), 8, DEVICE)
    twin = copy.deepcopy(model).to(DEVICE)
    twin.lm_head.weight = nn.Parameter(twin.lm_head.weight.detach().clone())
    for mine, its in zip(own.modules(), twin.modules(), strict=True):
        if isinstance(mine, Int8Linear):
            its.weight.data = unpack_int8(mine.weight, its.weight.dtype)
    return own, twin


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_the_model_of_these_numbers(calls, tied, dtype):
    own, twin = rounded(tiny(tied, dtype=dtype))
    linear_layers = [m for m in own.modules() if isinstance(m, nn.Linear)]
    assert len(linear_layers) == 15 and {type(m) for m in linear_layers} == {Int8Linear}
    assert own.get_input_embeddings().weight.dtype == own.dtype == dtype and own.device.type == DEVICE
    assert num_parameters(own) == sum(p.numel() for p in twin.parameters())
    tokens = torch.arange(5, 25, device=DEVICE)[None]
    with torch.inference_mode():
        found, exact = (model(tokens, use_cache=False).logits.float() for model in (own, twin))
    assert len(calls) == 15 and {rows for rows, _ in calls} == {20}
    assert (found - exact).abs().max() <= 0.03 * exact.abs().max()


def test_what_cannot_be_rounded_stays():
    """Other classes, sizes, dtypes and devices, and what a hook or a new forward makes something else."""
    good = nn.Linear(64, 24, dtype=torch.bfloat16)
    assert can_be_int8(good)
    for other in (nn.Linear(96, 24), nn.Linear(64, 20), nn.Linear(64, 24), nn.Linear(64, 24, device="meta")):
        assert not can_be_int8(other.bfloat16() if other.weight.shape != good.weight.shape else other)
    good.forward = lambda x: x
    assert not can_be_int8(good) and not can_be_int8(nn.Embedding(24, 64, dtype=torch.bfloat16))
    first, second = nn.Linear(64, 8, dtype=torch.float16), nn.Linear(64, 8, dtype=torch.float16)
    second.weight = first.weight
    assert to_int8([first, second], "cpu") == 64 * 8 and first.weight is second.weight


def test_layers_beside_each_other_are_one_product(calls):
    own, _ = rounded(tiny())
    plain = with_native_linear(own)
    merged = with_native_linear(with_merged(own, DEVICE))
    assert {type(m) for m in own.modules() if isinstance(m, nn.Linear)} == {Int8Linear}
    assert sum(type(m) is MergedInt8Linear for m in merged.modules()) == 10 and is_merged_as_before(merged)
    tokens = torch.arange(5, 14, device=DEVICE)[None]
    with torch.inference_mode():
        apart = plain(tokens, use_cache=False).logits
        calls.clear()
        assert torch.equal(merged(tokens, use_cache=False).logits, apart)
        assert calls == [(9, 128), (9, 64), (9, 256), (9, 64)] * 2 + [(9, 96)]
        own.model.layers[0].mlp.up_proj.weight.data = own.model.layers[0].mlp.up_proj.weight.detach().clone()
        assert not is_merged_as_before(merged)
        assert torch.equal(merged(tokens, use_cache=False).logits, apart)
    x = torch.randn(1, 3, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    merged.model.layers[1].mlp.up_proj(x).sum().backward()
    assert x.grad is not None
    mixed = copy.deepcopy(own)
    mixed.model.layers[0].self_attn.q_proj = nn.Linear(64, 64, False, device=DEVICE, dtype=torch.bfloat16)
    assert sum(type(m) is MergedInt8Linear for m in with_merged(mixed, DEVICE).modules()) == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)])
def test_norms_gates_and_sums_are_computed_on_the_way(monkeypatch, dtype):
    """In a step of few tokens of a model whose every layer is in 8 bits, as in one of 16 bits."""
    counted = as_on_a_gpu(monkeypatch)
    own, twin = tiny(dtype=dtype), tiny(dtype=dtype)
    to_int8([m for m in own.modules() if can_be_int8(m)], "cpu")
    for mine, its in zip(own.modules(), twin.modules(), strict=True):
        if isinstance(mine, Int8Linear):
            its.weight.data = unpack_int8(mine.weight, dtype)
    cached, exact = CachedModel(own, attention="model"), CachedModel(twin, attention="model")
    for count in (1, 5, MOST_ROWS, MOST_ROWS + 1):
        found, expected = (logits_of(each, count) for each in (cached, exact))
        assert torch.equal(found, expected)
    for count, each in ((MOST_ROWS - 1, (4, 4, 1)), (MOST_ROWS + 2, (0, 0, 9))):  # which nothing has recorded yet
        counted.clear()
        logits_of(cached, count)
        assert (counted["norm_linear"], counted["add_linear"], counted["linear"]) == each


@torch.inference_mode()
def logits_of(cached: CachedModel, count: int) -> torch.Tensor:
    return feed(cached, cached.new_cache(1, 40), [list(range(3, 3 + count))])


@pytest.mark.parametrize("bias", [None, torch.arange(56.0).bfloat16()])
def test_many_rows_are_multiplied_by_slices_of_numbers(calls, bias, monkeypatch):
    packed = pack_int8(torch.randn(56, 64, generator=torch.Generator().manual_seed(0))).to(DEVICE)
    bias = bias if bias is None else bias.to(DEVICE)
    monkeypatch.setattr(module, "EXPANDED", 16 * 64 * 2)
    seen = []
    monkeypatch.setattr(module, "unpack_int8", lambda some, dtype: seen.append(len(some)) or unpack_int8(some, dtype))
    for rows in (0, 1, MOST_ROWS_INT8, MOST_ROWS_INT8 + 1):
        x = torch.randn(1, rows, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
        with torch.inference_mode():
            found = product(x, packed, bias)
        torch.testing.assert_close(found, F.linear(x, unpack_int8(packed, x.dtype), bias), rtol=2e-2, atol=0.1)
    assert [rows for rows, _ in calls] == [0, 1, MOST_ROWS_INT8] and seen == [16, 16, 16, 8]
    wide = torch.randn(3, 64, device=DEVICE, dtype=torch.float64, requires_grad=True)  # as near-ties are judged
    assert torch.equal(product(wide, packed, None), F.linear(wide, unpack_int8(packed, torch.float64)))


def test_a_draft_changes_no_greedy_text(calls):
    target = tiny(dtype=torch.float32).to(DEVICE)
    draft, _ = rounded(tiny())
    asked = [list(range(1, 40))]
    plain = SpeculativeDecoder(target, None, 0).generate(asked, max_new_tokens=10)
    result = SpeculativeDecoder(target, draft, 3).generate(asked, max_new_tokens=10)
    assert result.tokens == plain.tokens and result.stats.accepted > 0 and calls


def test_what_others_take_of_it(calls, tmp_path):
    own, twin = rounded(tiny())
    head, ids = own.lm_head, torch.tensor([[3, 95], [8, 3]], device=DEVICE)
    assert is_packed(head) and width_of(head) == 64
    assert torch.equal(rows_of(head, ids), twin.lm_head.weight.detach().float()[ids].float()) or torch.equal(
        rows_of(head, ids), unpack_int8(head.weight)[ids]
    )
    assert torch.equal(weight_of(head), unpack_int8(head.weight))
    x = torch.randn(1, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    d2t = torch.tensor([0, 9, 95], device=DEVICE)
    assert torch.equal(target_head(own, 64, d2t)(x), F.linear(x, unpack_int8(head.weight)[d2t].bfloat16()))
    with pytest.raises(ValueError, match="model: its weights are packed"):
        own.save_pretrained(tmp_path)


def test_the_doctor_says_it(monkeypatch):
    own, _ = rounded_on_cpu()
    monkeypatch.setattr("specdec.models.native_report.has_kernel", lambda: True)
    told = native_report(own)
    assert told["linear layers"].startswith("13 of INT8") and "13 in 8 bits, up to 64" in told["on an NVIDIA GPU"]


def rounded_on_cpu() -> tuple[LlamaForCausalLM, int]:
    model = tiny(inner=96)
    return model, to_int8([m for m in model.modules() if can_be_int8(m)], "cpu")


def test_loading(calls, tmp_path, monkeypatch):
    """By ours where its kernels are, by bitsandbytes where they are not."""
    tiny().save_pretrained(tmp_path / "model")
    for dtype in ("auto", "bfloat16", torch.float16):
        model = load_model(tmp_path / "model", dtype, DEVICE, bits=8)
        assert isinstance(model.lm_head, Int8Linear) and not model.training
        assert model.dtype == (torch.float16 if dtype == torch.float16 else torch.bfloat16)
    with pytest.raises(ValueError, match="dtype: got float32 with bits=8 on a GPU, allowed: bfloat16 or float16"):
        load_model(tmp_path / "model", "float32", DEVICE, bits=8)
    tiny().float().save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match="dtype: got float32 with bits=8 on a GPU, allowed: bfloat16 or float16"):
        load_model(tmp_path / "wide", "auto", DEVICE, bits=8)
    tiny(inner=96).save_pretrained(tmp_path / "in part")
    with pytest.warns(RuntimeWarning, match="bits: 8[0-9]% of the model's parameters are packed"):
        load_model(tmp_path / "in part", "auto", DEVICE, bits=8)
    narrow = LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(narrow).bfloat16().save_pretrained(tmp_path / "narrow")
    with pytest.raises(ValueError, match="bits: got 8 for weights that are in no rows of whole blocks, allowed: None"):
        load_model(tmp_path / "narrow", "auto", DEVICE, bits=8)
    monkeypatch.setattr(plan, "has_kernel", lambda: False)
    monkeypatch.setattr(plan.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="bits: got 8 without bitsandbytes, allowed: None, or: pip install"):
        load_model(tmp_path / "model", "auto", DEVICE, bits=8)


@on_gpu
def test_a_captured_product_is_the_same():
    packed = pack_int8(torch.randn(512, 1024)).cuda()
    for rows in (5, MOST_ROWS_INT8 + 1):
        x = torch.randn(1, rows, 1024, dtype=torch.bfloat16, device="cuda")
        with torch.inference_mode():
            before = product(x, packed, None)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = product(x, packed, None)
            x.mul_(2)
            graph.replay()
            assert torch.equal(found, product(x, packed, None)) and not torch.equal(found, before)
