"""Linear layers of a GPU whose weights are integers of 8 bits, and without a GPU their kernel on fibers: the product of
the numbers that they stand for, rounded once, and a row's bits whatever the others are."""

from __future__ import annotations

import pytest
import simt.kernels
import torch
from specdec_layers import Packing, add_linear, linear, norm_linear, pack_int8, unpack_int8
from support.captured import on_gpu
from torch.nn import functional as F

ON_GPU = torch.cuda.is_available()
DTYPES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # and the largest relative error of rounding to them
SIZES = [(64, 8), (128, 16), (192, 24), (576, 40), (1024, 16), (1344, 56)]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, inputs], by the kernel."""
    if not ON_GPU:
        return simt.kernels.linear(x, packed, bias)
    return linear(x[None].cuda(), packed.cuda(), None if bias is None else bias.cuda(), Packing.INT8)[0].cpu()


def besides(x, packed, bias, *, norm=None, base=None, activation=None) -> torch.Tensor:
    """The same after a norm of epsilon 0, with a gate, or added to ``base``."""
    if not ON_GPU:
        return simt.kernels.linear(x, packed, bias, norm=norm, base=base, activation=activation)
    x, packed, bias = x[None].cuda(), packed.cuda(), bias.cuda()
    if base is not None:
        return add_linear(base[None].cuda(), x, packed, bias)[0].cpu()
    return norm_linear(x, norm.cuda(), 0.0, packed, bias, activation=activation)[0].cpu()


def test_rows_are_rounded_to_the_nearest():
    weight = numbers(40, 192) * 10.0 ** torch.linspace(-9, 9, 40)[:, None]
    weight[3], weight[5, :191] = 0, 0
    packed = pack_int8(weight.bfloat16())
    assert packed.shape == (40, 196) and packed.dtype == torch.uint8
    weight = weight.bfloat16().double()
    step, found = weight.abs().amax(1, True) / 127, unpack_int8(packed).double()
    assert ((found - weight).abs() <= 0.50001 * step).all()
    assert torch.equal(found.abs().argmax(1), weight.abs().argmax(1)) and not found[3].any()
    integers = found / step.where(step > 0, 1)
    assert (integers - integers.round()).abs().max() < 1e-3 and integers.abs().max() < 127.01
    for part in (slice(0, 8), slice(16, 40)):
        assert torch.equal(unpack_int8(packed[part]), unpack_int8(packed)[part])
    assert torch.equal(torch.cat([packed[:16], packed[16:]]), packed)  # rows that are merged lie so
    for dtype in (*DTYPES, torch.float64):
        assert torch.equal(unpack_int8(packed, dtype), unpack_int8(packed).to(dtype))


@pytest.mark.parametrize("wrong", [torch.zeros(8, 32), torch.zeros(9, 64), torch.zeros(8, 64).int(), torch.zeros(64)])
def test_what_cannot_be_packed_is_refused(wrong):
    with pytest.raises(ValueError, match=r"weight: got torch.*, allowed: floating numbers, \[8 n, 64 m\]"):
        pack_int8(wrong)


def test_what_is_not_packed_is_refused():
    packed = pack_int8(numbers(16, 64))
    for wrong in (packed[4:], packed[:, :64], packed.char(), packed.T.contiguous().T):
        with pytest.raises(ValueError, match="packed: got .*, allowed: uint8 of shape .*, contiguous"):
            unpack_int8(wrong)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_it_is_the_product_rounded_once(dtype, inputs, outputs):
    packed, bias, x = (
        pack_int8(numbers(outputs, inputs)),
        numbers(outputs, seed=1).to(dtype),
        numbers(17, inputs, seed=2),
    )
    weight, x = unpack_int8(packed).double(), x.to(dtype)
    for rows in (1, 2, 7, 8, 9, 16, 17):
        for added in (None, bias):
            exact = x[:rows].double() @ weight.T + (0 if added is None else added.double())
            y = product(x[:rows], packed, added)
            assert y.dtype == dtype and y.shape == (rows, outputs)
            summed = 2.0**-21 * (x[:rows].double().abs() @ weight.T.abs() + 1)
            assert ((y - exact).abs() <= DTYPES[dtype] * exact.abs() * 1.001 + summed).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_integer_is_exact(dtype):
    """One input at a time, at each place of a tile, with scales that are powers of two."""
    integers = torch.arange(8 * 64).view(8, 64).mul(37).remainder(255) - 127
    integers[:, 0] = 127 * (-1) ** torch.arange(8)  # so that the scale is what is expected
    packed, scale = pack_int8(integers * 2.0 ** torch.arange(-4, 4)[:, None]), 2.0 ** torch.arange(-4, 4)
    assert integers.unique().numel() > 200
    y = product(torch.eye(64, dtype=dtype), packed)
    assert torch.equal(y.double(), (integers * scale[:, None]).T.to(dtype).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES[2:])
def test_a_row_does_not_depend_on_the_others(dtype, inputs, outputs):
    """What is summed cancels, so that another order would give other numbers."""
    half = inputs // 2
    weight = numbers(outputs, half)
    packed, x = (
        pack_int8(torch.cat((weight, weight.flip(1)), 1)),
        numbers(16, half, seed=2) * 2.0 ** (torch.arange(half) % 9),
    )
    x = torch.cat((x, -x.flip(1)), 1).to(dtype)
    alone = torch.cat([product(row[None], packed) for row in x])
    assert inputs < 1000 or alone.count_nonzero() > alone.numel() / 4
    for rows in range(1, 17):
        assert torch.equal(product(x[:rows], packed), alone[:rows])
    assert torch.equal(product(x[5:].flip(0), packed), alone[5:].flip(0))
    assert torch.equal(product(x.repeat(3, 1)[:37], packed), alone.repeat(3, 1)[:37])
    assert torch.equal(product(x[:3], packed[8:]), alone[:3, 8:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 8, 11])
def test_what_is_computed_besides(dtype, rows):
    """A norm before, a gate, and a sum after it have the bits that separate operations have. Here the squares of x have
    a mean of 1, in any order of their sum."""
    inputs, outputs = 576, 40
    packed, base = pack_int8(numbers(2 * outputs, inputs)), numbers(rows, 2 * outputs, seed=3).to(dtype)
    order = torch.stack([torch.randperm(inputs, generator=torch.Generator().manual_seed(row)) for row in range(rows)])
    normed = torch.tensor([1.5, 1.5, -1.5, 0.5, -0.5, 0.5, 0.5, 0.5]).repeat(inputs // 8)[order].to(dtype)
    x, bias, one = normed * 4, numbers(2 * outputs, seed=1).to(dtype), torch.ones(inputs, dtype=dtype)
    alone = product(normed, packed, bias)
    assert torch.equal(besides(x, packed, bias, norm=one), alone)
    assert torch.equal(besides(normed, packed, bias, base=base), (base.float() + alone.float()).to(dtype))
    gate, up = alone.chunk(2, -1)
    own = F.silu(gate.float()).to(dtype) * up
    found = besides(x, packed, bias, norm=one, activation="silu")
    assert found.shape == own.shape == (rows, outputs)
    assert ((found.float() - own.float()).abs() <= 2 * torch.finfo(dtype).eps * own.abs().float() + 1e-6).all()
    assert (found != own).sum() <= 1 + own.numel() // 50


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fault_stays_in_its_row(dtype):
    packed, x = pack_int8(numbers(24, 128).abs() + 0.1), torch.ones(12, 128, dtype=dtype)
    x[1, 95], x[2, 0], x[11, 40] = float("nan"), float("inf"), float("nan")
    y = product(x, packed)
    assert y[[1, 11]].isnan().all() and (y[2] == float("inf")).all() and y[[0, *range(3, 11)]].isfinite().all()


@pytest.mark.skipif(ON_GPU, reason="fibers count")
def test_half_of_the_bytes_are_read():
    packed = pack_int8(numbers(48, 576))
    for rows in (1, 8, 16):
        simt.kernels.take_counts()
        product(numbers(rows, 576).bfloat16(), packed)
        work = simt.kernels.take_counts()
        assert work.loads == 48 * 576 / 16 and work.launches == 1 and work.blocks == 3


@on_gpu
def test_wrong_tensors_are_refused():
    packed, x = pack_int8(numbers(8, 64)).cuda(), torch.zeros(1, 1, 64, dtype=torch.bfloat16, device="cuda")
    for weight, packing, told in (
        (packed, Packing.NONE, "weight has a wrong shape or dtype"),
        (packed, Packing.Q8_0, "packing is 8"),
        (packed[:, :64], Packing.INT8, "weight has a wrong shape or dtype"),
        (packed[:4], Packing.INT8, "a multiple of 8 outputs"),
    ):
        with pytest.raises(RuntimeError, match=told):
            linear(x, weight, None, packing)
