"""Linear layers with what a decoder layer has around them: on a GPU, and without one their kernel on fibers. They have
the bits of the separate operations, but for the order in which a norm adds up squares, whatever the other rows are."""

from __future__ import annotations

import pytest
import simt.kernels
import torch
from specdec_layers import add_linear, linear, norm_linear
from specdec_layers.backends import operation
from support.captured import on_gpu
from torch.nn import functional as F

ON_GPU = torch.cuda.is_available()
DTYPES = (torch.bfloat16, torch.float16)
SIZES = [(32, 5), (64, 16), (288, 1), (576, 40), (1312, 17)]
ROWS = (1, 3, 8, 9, 16, 17)
FORMS = [{}, {"round_first": True}, {"offset": 1.0}]
EPSILON = 1e-6


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on_device(run, *tensors, **options) -> torch.Tensor:
    return run(*(None if t is None else t.cuda() for t in tensors), **options)[0].cpu()


def plain(x, weight, bias=None) -> torch.Tensor:
    return on_device(linear, x[None], weight, bias) if ON_GPU else simt.kernels.linear(x, weight, bias)


def of_norm(x, norm, weight, bias=None, activation=None, **form) -> torch.Tensor:
    if not ON_GPU:
        own = {"norm": norm, "epsilon": EPSILON, "activation": activation, **form}
        return simt.kernels.linear(x, weight, bias, **own)

    def run(x, norm, weight, bias):
        return norm_linear(x, norm, EPSILON, weight, bias, activation=activation, backend="cuda", **form)

    return on_device(run, x[None], norm, weight, bias)


def added(base, x, weight, bias=None) -> torch.Tensor:
    if not ON_GPU:
        return simt.kernels.linear(x, weight, bias, base=base)
    return on_device(add_linear, base[None], x[None], weight, bias, backend="cuda")


def by_torch(x, norm, weight, bias=None, activation=None, **form) -> torch.Tensor:
    return norm_linear(x[None], norm, EPSILON, weight, bias, activation=activation, backend="reference", **form)[0]


def of_known_norm(rows: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, its norm), of numbers whose squares have a mean of 1 in any order, times a power of two a row."""
    generator = torch.Generator().manual_seed(rows)
    each = torch.tensor([1.5, 1.5, 1.5, 0.5, 0.5, 0.5, 0.5, 0.5]).repeat(inputs // 8)
    order = torch.stack([torch.randperm(inputs, generator=generator) for _ in range(rows)])
    signs = torch.randint(2, (rows, inputs), generator=generator) * 2 - 1
    x = (each[order] * signs).to(dtype)
    return x * 2.0 ** (2 + torch.arange(rows) % 5)[:, None].to(dtype), x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_norm_has_the_bits_of_the_separate_operations(dtype, inputs, outputs, form):
    weight, bias = numbers(outputs, inputs, dtype=dtype), numbers(outputs, dtype=dtype, seed=1)
    norm = numbers(inputs, dtype=dtype, seed=2)
    for rows in ROWS:
        x, normed = of_known_norm(rows, inputs, dtype)
        normed = (normed.float() * (norm.float() + form.get("offset", 0.0))).to(dtype)
        for of_both in (None, bias):
            assert torch.equal(of_norm(x, norm, weight, of_both, **form), plain(normed, weight, of_both))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_rounds_where_the_operation_does(dtype):
    """Products with 1 are exact, so that results are the norm itself."""
    inputs = 96
    x, norm, one = numbers(16, inputs, dtype=dtype) * 3, numbers(inputs, dtype=dtype, seed=1), torch.eye(inputs)
    for form in FORMS:
        found, own = of_norm(x, norm, one.to(dtype), **form), by_torch(x, norm, one.to(dtype), **form)
        last_bits = torch.finfo(dtype).eps * own.abs().float() * (2 if form else 1)
        assert ((found.float() - own.float()).abs() <= last_bits).all()
        assert (found != own).sum() <= own.numel() // 200
    assert (by_torch(x, norm, one.to(dtype)) != own).sum() > own.numel() // 4  # by an offset
    first, late = (by_torch(x, norm, one.to(dtype), round_first=first) for first in (True, False))
    assert (first != late).sum() > own.numel() // 20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
def test_errors_are_no_larger_than_torchs(dtype, activation):
    for inputs, outputs in SIZES:
        weight, norm = numbers(2 * outputs, inputs, dtype=dtype), numbers(inputs, dtype=dtype, seed=1)
        x = numbers(16, inputs, dtype=dtype, seed=2)
        wide = x.double() * (x.double().square().mean(-1, keepdim=True) + EPSILON).rsqrt() * norm.double()
        exact = wide @ weight.double().T
        if activation is not None:
            gate, up = exact.chunk(2, -1)
            exact = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
        found, own = (of(x, norm, weight, activation=activation, round_first=True) for of in (of_norm, by_torch))
        assert (found - exact).norm() <= 1.01 * (own - exact).norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype):
    """Nor on its place. Squares of a few numbers are so large that another order would lose others of them."""
    inputs, outputs = 1312, 40
    x = numbers(16, inputs, dtype=dtype, seed=2)
    x[:, ::41] *= 2.0**11 if dtype == torch.bfloat16 else 2.0**6
    norm, one = numbers(inputs, dtype=dtype), torch.eye(inputs, dtype=dtype)[:outputs].repeat(2, 1)
    base = numbers(16, 2 * outputs, dtype=dtype, seed=4)
    alone = torch.cat([of_norm(row[None], norm, one) for row in x])
    of_gate = torch.cat([of_norm(row[None], norm, one, activation="silu") for row in x])
    of_sum = torch.cat([added(base[i : i + 1], x[i : i + 1], one) for i in range(16)])
    for rows in (2, 5, 8, 9, 16):
        last = slice(16 - rows, 16)
        assert torch.equal(of_norm(x[last].flip(0), norm, one).flip(0), alone[last])
        assert torch.equal(of_norm(x[last], norm, one, activation="silu"), of_gate[last])
        assert torch.equal(added(base[last], x[last], one), of_sum[last])
    assert torch.equal(of_norm(x.repeat(2, 1), norm, one), alone.repeat(2, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gate_is_that_of_the_separate_operations(dtype, inputs, outputs, activation):
    weight, bias = numbers(2 * outputs, inputs, dtype=dtype) / inputs**0.5, numbers(2 * outputs, dtype=dtype, seed=1)
    norm = torch.ones(inputs, dtype=dtype)
    for rows in ROWS:
        x, normed = of_known_norm(rows, inputs, dtype)
        for of_both in (None, bias):
            gate, up = plain(normed, weight, of_both).chunk(2, -1)
            wide = gate.double()
            own = (F.silu(wide) if activation == "silu" else F.gelu(wide, approximate="tanh")).to(dtype) * up
            found = of_norm(x, norm, weight, of_both, activation)
            assert found.shape == (rows, outputs)
            last_bits = torch.finfo(dtype).eps * (2 * own.abs().float() + torch.finfo(dtype).smallest_normal)
            assert ((found.float() - own.float()).abs() <= last_bits).all()
            assert (found != own).sum() <= 1 + own.numel() // 100


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_of_any_size(activation):
    """What is not finite stays in its row."""
    inputs, dtype = 32, torch.bfloat16
    gates = torch.tensor([-3e38, -1e4, -100.0, -88.0, -1e-30, 0.0, 1e-30, 50.0, 3e38, torch.inf, torch.nan])
    weight = torch.zeros(2 * len(gates), inputs, dtype=dtype)
    bias = torch.cat([gates, torch.ones(len(gates))]).to(dtype)
    x = numbers(2, inputs, dtype=dtype)
    found = of_norm(x, torch.ones(inputs, dtype=dtype), weight, bias, activation)
    gate = bias[: len(gates)]
    own = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    torch.testing.assert_close(found, own.expand(2, -1), rtol=2.0**-7, atol=1e-34, equal_nan=True)
    x[1, 3] = torch.nan
    found = of_norm(x, torch.ones(inputs, dtype=dtype), weight + 1, None, activation)
    assert found[0].isfinite().all() and found[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_sum_has_the_bits_of_the_separate_operations(dtype, inputs, outputs):
    weight, bias = numbers(outputs, inputs, dtype=dtype), numbers(outputs, dtype=dtype, seed=1)
    for rows in ROWS:
        x, base = numbers(rows, inputs, dtype=dtype, seed=2), 8 * numbers(rows, outputs, dtype=dtype, seed=3)
        for of_both in (None, bias):
            assert torch.equal(added(base, x, weight, of_both), base + plain(x, weight, of_both))


@pytest.mark.skipif(ON_GPU, reason="fibers count")
def test_weights_are_read_once_and_rows_may_lie_apart():
    wide, norm = numbers(16, 1200, dtype=torch.bfloat16), numbers(576, dtype=torch.bfloat16)
    weight = numbers(96, 576, dtype=torch.bfloat16)
    for rows in (1, 8, 16):
        simt.kernels.take_counts()
        found = of_norm(wide[:rows, 32:608], norm, weight, None, "silu")
        work = simt.kernels.take_counts()
        assert work.loads == 96 * 576 * 2 / 16 and work.launches == 1 and work.blocks == 6
        assert torch.equal(found, of_norm(wide[:rows, 32:608].contiguous(), norm, weight, None, "silu"))


# ---- The operations, which are PyTorch's where there is no kernel


def test_what_they_compute():
    x, norm, weight, bias = (torch.randn(s) for s in ((2, 3, 12), (12,), (6, 12), (6,)))
    normed = F.rms_norm(x, (12,), norm + 1, EPSILON)
    torch.testing.assert_close(norm_linear(x, norm, EPSILON, weight, bias, offset=1.0), F.linear(normed, weight, bias))
    gate, up = F.linear(normed, weight).chunk(2, -1)
    for activation, own in (("silu", F.silu(gate)), ("gelu_tanh", F.gelu(gate, approximate="tanh"))):
        found = norm_linear(x, norm, EPSILON, weight, offset=1.0, activation=activation)
        torch.testing.assert_close(found, own * up)
    base = torch.randn(2, 3, 6)
    assert torch.equal(add_linear(base, x, weight, bias), base + F.linear(x, weight, bias))


def test_what_is_refused():
    x, norm, weight = torch.zeros(1, 2, 32), torch.zeros(32), torch.zeros(6, 32)
    refusals = [
        (ValueError, "activation: got 'relu', allowed: None, 'silu', 'gelu_tanh'", {"activation": "relu"}),
        (ValueError, "weight: got 5 outputs, allowed: an even", {"weight": weight[:5], "activation": "silu"}),
        (ValueError, "backend: got 'triton', allowed: 'auto', 'cuda', 'reference'", {"backend": "triton"}),
        (RuntimeError, "norm_weight has a wrong", {"norm_weight": norm[:1]}),
        (RuntimeError, "norm_weight has a wrong", {"norm_weight": norm.double()}),
        (RuntimeError, "weight has a wrong", {"weight": weight[:, :31]}),
        (RuntimeError, "bias has a wrong", {"bias": norm[:1]}),
    ]
    if not ON_GPU:
        refusals.append((RuntimeError, "backend 'cuda' cannot run here", {"backend": "cuda"}))
    for kind, told, other in refusals:
        with pytest.raises(kind, match=told):
            norm_linear(**{"x": x, "norm_weight": norm, "epsilon": EPSILON, "weight": weight, **other})
    for told, base in (("base has a wrong", x[..., :1]), ("base has a wrong", x[:, :1, :6])):
        with pytest.raises(RuntimeError, match=told):
            add_linear(base, x, weight)
    with pytest.raises(ValueError, match="backend: got 'cpu'"):
        add_linear(x[..., :6], x, weight, backend="cpu")


@on_gpu
def test_what_is_refused_on_a_gpu():
    x, norm, weight = (torch.zeros(s, dtype=torch.bfloat16, device="cuda") for s in ((1, 2, 32), (32,), (6, 32)))
    for told, other in (
        ("norm_weight has a wrong", {"norm_weight": norm[:1]}),
        ("norm_weight is on another device", {"norm_weight": norm.cpu()}),
        ("weight has a wrong", {"weight": weight[:, :31]}),
        ("bias has a wrong", {"bias": norm[:1]}),
        ("bfloat16 or float16", {"x": x.float()}),
    ):
        with pytest.raises(RuntimeError, match=told):
            norm_linear(**{"x": x, "norm_weight": norm, "epsilon": EPSILON, "weight": weight, **other})
    with pytest.raises(RuntimeError, match="base has a wrong"):
        add_linear(x[:, :1, :6], x, weight)


@pytest.mark.parametrize("gate", [0, 1, 2])
def test_torch_knows_the_operations(gate):
    x, norm, weight, bias = (torch.randn(s) for s in ((2, 3, 32), (32,), (6, 32), (6,)))
    utilities = ("test_schema", "test_faketensor")
    of_norm = operation("norm_linear", "reference", "cpu"), (x, norm, EPSILON, 0.0, True, weight, bias, gate)
    of_sum = operation("add_linear", "reference", "cpu"), (torch.randn(2, 3, 6), x, weight, bias)
    for run, given in (of_norm, of_sum):
        torch.library.opcheck(run, given, test_utils=utilities)
