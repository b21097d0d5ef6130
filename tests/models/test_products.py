"""Linear layers of 16 bits on a GPU: which of them are ours, and for how many rows. Without a GPU, a CPU stands for it,
and the kernel runs on fibers."""

from __future__ import annotations

import copy

import pytest
import simt.kernels
import torch
from specdec import SpeculativeDecoder
from specdec.models.exchanged import linear as layers
from specdec.models.exchanged import product as module
from specdec.models.exchanged.linear import NativeLinear, with_native_linear
from specdec.models.exchanged.product import MOST_ROWS, product
from specdec.models.native_report import native_report
from specdec_layers import Packing, linear
from support.captured import on_gpu
from support.model_types import model_of
from support.models import tiny_model
from torch import nn
from torch.nn import functional as F

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """The numbers of rows with which the kernel was called."""
    found: list[int] = []

    def kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, packing: Packing) -> torch.Tensor:
        found.append(x.shape[0] * x.shape[1])
        if ON_GPU:
            return linear(x, weight, bias, packing)
        return simt.kernels.linear(x.flatten(0, 1), weight, bias).view(*x.shape[:2], len(weight))

    monkeypatch.setattr(module, "linear", kernel)
    if not ON_GPU:
        monkeypatch.setattr(module, "has_kernel", lambda: True)
        for each in (module, layers):
            monkeypatch.setattr(each, "DEVICE", "cpu")
    return found


def layer_of(inputs: int = 64, outputs: int = 24, dtype: torch.dtype = torch.bfloat16, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype, device=DEVICE)


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows_go_through_the_kernel(calls, dtype):
    layer = with_native_linear(layer_of(dtype=dtype))
    assert type(layer) is NativeLinear
    with torch.inference_mode():
        for shape in ((64,), (1, 1, 64), (3, 5, 64), (2, 2, 2, 64), (0, 3, 64), (MOST_ROWS, 64), (MOST_ROWS + 1, 64)):
            x = rows(*shape, dtype=dtype)
            torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=2e-2, atol=2e-2)
    assert calls == [1, 1, 15, 8, 0, MOST_ROWS]


def test_a_row_does_not_depend_on_the_others(calls):
    layer, x = with_native_linear(layer_of(bias=False)), rows(4, 4, 64)
    with torch.inference_mode():
        many = layer(x)
        for i in range(4):
            assert torch.equal(layer(x[i : i + 1]), many[i : i + 1])
            assert torch.equal(layer(x[:, i : i + 1]), many[:, i : i + 1])


def test_other_layers_stay(calls):
    wide = layer_of()
    wide.weight = nn.Parameter(wide.weight.detach().repeat(1, 2)[:, :64])  # rows that lie apart
    apart = layer_of()
    apart.weight = nn.Parameter(torch.zeros(24 * 64 + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(24, 64))
    for other in (layer_of(48), wide, apart, nn.Embedding(4, 64, dtype=torch.bfloat16, device=DEVICE)):
        assert with_native_linear(other) is other
    assert type(with_native_linear(nn.Sequential(apart, layer_of()))[1]) is NativeLinear


def test_what_the_kernel_does_not_compute(calls):
    """Gradients, autocast, other dtypes, and weights that were replaced by others."""
    layer = with_native_linear(layer_of())
    layer(rows(1, 2, 64).requires_grad_()).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        with torch.autocast(DEVICE, torch.float16):
            assert layer(rows(1, 2, 64)).dtype == torch.float16
        with pytest.raises(RuntimeError):
            layer(rows(1, 2, 64, dtype=torch.float16))
        layer.weight.data = torch.zeros(24 * 64 + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(24, 64)
        assert torch.equal(layer(rows(1, 2, 64)), layer.bias.expand(1, 2, 24))
        assert not calls
        with pytest.raises(RuntimeError):
            product(rows(1, 2, 64), layer_of().weight.float(), None)


@pytest.mark.parametrize("case", ["llama", "qwen2", "gemma3_text", "gpt_neox"])
def test_a_model_decodes_by_it(calls, case):
    """Each of its products, and the head's, of few tokens."""
    model = copy.deepcopy(model_of(case)).to(DEVICE, torch.bfloat16)
    fast = with_native_linear(model)
    ours = [m for m in fast.modules() if isinstance(m, nn.Linear) and m.in_features % 32 == 0]
    assert ours and {type(m) for m in ours} == {NativeLinear} and NativeLinear not in {type(m) for m in model.modules()}
    tokens = torch.arange(5, 14, device=DEVICE)[None]
    with torch.inference_mode():
        expected, found = (m(tokens, use_cache=False).logits.float() for m in (model, fast))
    assert set(calls) == {9} and len(calls) == len(ours)
    # Rarely is a number rounded to another neighbour.
    assert (found - expected).abs().max() <= 0.03 * expected.abs().max()
    calls.clear()
    SpeculativeDecoder(model, model, 3).generate([list(range(1, 40))], max_new_tokens=6)
    assert {1, 4} <= set(calls) and max(calls) <= MOST_ROWS


def test_the_doctor_says_it(monkeypatch):
    model = tiny_model()
    ours = sum(isinstance(m, nn.Linear) and m.in_features % 32 == 0 for m in model.modules())
    for built in (True, False):
        monkeypatch.setattr("specdec.models.native_report.has_kernel", lambda built=built: built)
        told = native_report(model).get("on an NVIDIA GPU", "")
        said = f"with 4 norms and 4 sums on their way, up to {MOST_ROWS} tokens at a time"
        assert (told.startswith(f"{ours} of ") and told.endswith(said)) if built else not told


@on_gpu
def test_a_captured_product_is_the_same():
    layer, x = with_native_linear(layer_of(1024, 512)), rows(1, 5, 1024)
    with torch.inference_mode():
        before = layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layer(x)
        x.mul_(2)
        graph.replay()
        assert torch.equal(found, layer(x)) and not torch.equal(found, before)
