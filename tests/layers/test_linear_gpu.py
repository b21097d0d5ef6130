"""Linear layers of bfloat16 and float16 on a GPU, and without one their kernel on fibers: the product, rounded once,
and a row's bits whatever the others are."""

from __future__ import annotations

import pytest
import simt.kernels
import torch
from specdec_layers import Packing, linear, linears
from support.captured import on_gpu
from torch.nn import functional as F

ON_GPU = torch.cuda.is_available()
DTYPES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # and the largest relative error of rounding to them
SIZES = [(32, 5), (64, 16), (224, 33), (288, 1), (576, 40), (1024, 16), (1312, 17)]


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, inputs] as a caller has it, by the kernel."""
    if not ON_GPU:
        return simt.kernels.linear(x, weight, bias)
    storage = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype, device="cuda")
    mine = storage.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)
    return linear(mine[None], weight.cuda(), None if bias is None else bias.cuda())[0].cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_it_is_the_product_rounded_once(dtype, inputs, outputs):
    weight, bias = numbers(outputs, inputs, dtype=dtype), numbers(outputs, dtype=dtype, seed=1)
    x = numbers(17, inputs, dtype=dtype, seed=2)
    for rows in (1, 2, 7, 8, 9, 16, 17):
        for added in (None, bias):
            exact = x[:rows].double() @ weight.double().T + (0 if added is None else added.double())
            y = product(x[:rows], weight, added)
            assert y.dtype == dtype and y.shape == (rows, outputs)
            summed = 2.0**-22 * (x[:rows].double().abs() @ weight.double().T.abs() + 1)
            assert ((y - exact).abs() <= DTYPES[dtype] * exact.abs() * 1.001 + summed).all()
            theirs = F.linear(x[:rows], weight, added)
            assert (y - exact).norm() <= 1.001 * (theirs - exact).norm() + summed.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_row_does_not_depend_on_the_others(dtype, inputs, outputs):
    """Nor on its place, nor an output on those before it. What is summed cancels, but for the rounding of sums: another
    order would give other numbers altogether, where it might not be seen in sums that are rounded to 16 bits."""
    half, others = inputs // 2, torch.randperm(inputs // 2, generator=torch.Generator().manual_seed(3))
    weight, bias = numbers(outputs, half, dtype=dtype), numbers(outputs, dtype=dtype, seed=1) * 2.0**-20
    x = numbers(16, half, dtype=dtype, seed=2) * (2 ** (others % 11)).to(dtype)
    weight, x = torch.cat((weight, weight[:, others]), 1), torch.cat((x, -x[:, others]), 1)
    alone = torch.cat([product(row[None], weight, bias) for row in x])
    assert inputs < 224 or (alone - bias).count_nonzero() > alone.numel() / 2
    for rows in range(1, 17):
        assert torch.equal(product(x[:rows], weight, bias), alone[:rows])
    assert torch.equal(product(x[5:].flip(0), weight, bias), alone[5:].flip(0))
    assert torch.equal(product(x.repeat(3, 1)[:37], weight, bias), alone.repeat(3, 1)[:37])
    for first in (1, 3, outputs - 1):
        assert torch.equal(product(x[:3], weight[first:], bias[first:]), alone[:3, first:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_rounded_to_the_nearest(dtype):
    """As torch rounds float32: ties, what is too large, subnormal numbers, zeros and NaN."""
    least, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    step = torch.finfo(dtype).eps
    first = torch.tensor(
        [1.0, 1 + step, 1 + 2 * step, most, most, -most, least, least / 4, 0.0, -3.0, torch.inf, torch.nan]
    )
    second = torch.tensor(
        [step / 2, step / 2, step / 4, most * step / 4, most * step / 8, -most, -least / 2, least * step, 0.0]
    )
    x = torch.zeros(len(first) * len(second), 32)
    x[:, 3], x[:, 21] = first.repeat_interleave(len(second)), second.repeat(len(first))
    x = x.to(dtype)
    weight = torch.ones(1, 32, dtype=dtype)
    y, exact = product(x, weight)[:, 0], (x[:, 3].float() + x[:, 21].float()).to(dtype)
    assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y[~y.isnan()], exact[~y.isnan()])
    assert y.isinf().any() and (y.abs()[y != 0] < least).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fault_stays_in_its_row(dtype):
    weight, x = numbers(20, 96, dtype=dtype).abs(), torch.ones(12, 96, dtype=dtype)
    x[1, 95], x[2, 0], x[11, 40] = float("nan"), float("inf"), float("nan")
    y = product(x, weight)
    assert y[[1, 11]].isnan().all() and (y[2] == float("inf")).all() and y[[0, *range(3, 11)]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart(dtype):
    weight, wide = numbers(18, 64, dtype=dtype), numbers(9, 160, dtype=dtype, seed=1)
    assert torch.equal(product(wide[:, 32:96], weight), product(wide[:, 32:96].contiguous(), weight))


def test_nothing_to_compute():
    weight = numbers(3, 32, dtype=torch.bfloat16)
    assert product(weight[:0], weight).shape == (0, 3)
    assert product(weight, weight[:0]).shape == (3, 0)
    assert torch.equal(product(weight[:, :0], weight[:, :0], weight[:, 0]), weight[:, 0].expand(3, 3))


@on_gpu
def test_tensors_of_any_strides():
    """Which the operation copies, unless rows of x lie evenly apart."""
    weight, x = numbers(20, 64, dtype=torch.bfloat16).cuda(), numbers(6, 64, dtype=torch.bfloat16, seed=1).cuda()
    expected = linear(x.view(2, 3, 64), weight)
    shifted = torch.empty(20 * 64 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(20, 64).copy_(weight)
    for other in (weight.T.contiguous().T, weight.repeat(1, 2)[:, :64], shifted):
        assert torch.equal(linear(x.view(2, 3, 64), other), expected)
    wide = torch.zeros(2, 3, 97, dtype=torch.bfloat16, device="cuda")
    for part in (wide[..., :64], wide[..., 1:65]):
        assert torch.equal(linear(part.copy_(x.view(2, 3, 64)), weight), expected)
    assert torch.equal(
        linear(x.view(3, 2, 64).transpose(0, 1), weight), linear(x.view(3, 2, 64), weight).transpose(0, 1)
    )
    assert torch.equal(linear(x.view(2, 3, 64)[:, -1:], weight), expected[:, -1:])
    first, second = linears(x[None], [weight, weight[:4]], [None, weight[0, :4]])
    assert torch.equal(first.view(2, 3, 20), expected) and second.shape == (1, 6, 4)


@on_gpu
@pytest.mark.parametrize(
    ("x", "weight", "bias", "told"),
    [
        ((1, 1, 40), (3, 40), None, "a multiple of 32 inputs"),
        ((1, 32), (3, 32), None, "a multiple of 32 inputs"),
        ((1, 1, 32), (3, 64), None, "weight has a wrong shape or dtype"),
        ((1, 1, 32), (3, 32), 4, "bias has a wrong shape or dtype"),
    ],
)
def test_wrong_tensors_are_refused(x, weight, bias, told):
    given = [None if s is None else torch.zeros(s, dtype=torch.bfloat16, device="cuda") for s in (x, weight, bias)]
    with pytest.raises(RuntimeError, match=told):
        linear(*given)
    with pytest.raises(RuntimeError, match="bfloat16 or float16"):
        linear(given[0].float(), given[1].float())
    with pytest.raises(RuntimeError, match="(weight|bias) is on another device"):
        linear(torch.zeros(1, 1, 32, dtype=torch.bfloat16, device="cuda"), torch.zeros(3, 32, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="allowed on a GPU"):
        linear(torch.zeros(1, 1, 32, dtype=torch.bfloat16, device="cuda"), given[1], None, Packing.Q8_0)


@pytest.mark.skipif(ON_GPU, reason="fibers count")
def test_weights_are_read_once_by_16_bytes():
    """However many rows of a tile there are."""
    weight = numbers(48, 576, dtype=torch.bfloat16)
    for rows in (1, 8, 16):
        simt.kernels.take_counts()
        product(numbers(rows, 576, dtype=torch.bfloat16), weight)
        work = simt.kernels.take_counts()
        assert work.loads == 48 * 576 * 2 / 16 and work.launches == 1 and work.blocks == 3
