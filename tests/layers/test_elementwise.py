"""What stands between the products of a layer on a CPU: formulas in float64, and bits that depend on nothing else."""

from __future__ import annotations

import pytest
import torch
from specdec_layers import add_rms_norm, gated, rms_norm, rope_angles, rotate
from specdec_layers.backends import operation
from specdec_layers.backends.triton import elementwise
from specdec_layers.ops import handle
from torch.nn import functional as F


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 7, 64, 100, 576, 1027])
def test_rms_norm(instruction_set, size):
    x, weight = numbers(3, 5, size) * torch.logspace(-4, 4, 5)[:, None], numbers(size, seed=1)
    for offset, own in ((0.0, weight), (1.0, weight), (0.0, None)):
        y = rms_norm(x, own, 1e-5, offset=offset)
        wide = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
        exact = wide if own is None else wide * (own.double() + offset)
        assert y.shape == x.shape and ((y - exact).abs() <= 5e-7 * (exact.abs() + 1)).all()
        for i in range(3):
            assert torch.equal(rms_norm(x[i : i + 1, 2:4], own, 1e-5, offset=offset)[0], y[i, 2:4])


@pytest.mark.parametrize("size", [1, 100, 576])
def test_add_rms_norm(instruction_set, size):
    """With the bits of an addition and a norm, or of two."""
    x, delta, weight, its_own = numbers(3, 5, size), numbers(3, 5, size, seed=1), numbers(size), numbers(size, seed=2)
    for own in (weight, None):
        total, y = add_rms_norm(x, delta, own, 1e-5, offset=1.0)
        assert torch.equal(total, x + delta) and torch.equal(y, rms_norm(x + delta, own, 1e-5, offset=1.0))
    total, y = add_rms_norm(x, delta, weight, 1e-5, offset=1.0, delta_weight=its_own, delta_epsilon=1e-3)
    expected = x + rms_norm(delta, its_own, 1e-3, offset=1.0)
    assert torch.equal(total, expected) and torch.equal(y, rms_norm(expected, weight, 1e-5, offset=1.0))


@pytest.mark.parametrize("size", [2, 8, 30, 64, 128])
def test_rotate(instruction_set, size):
    x, angles = numbers(3, 4, 5, size), numbers(3, 5, size // 2, seed=1) * 3
    cos, sin = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))
    for rows in (slice(0, 3), slice(0, 1)):
        y = rotate(x, cos[rows], sin[rows])
        a, b = x.double().chunk(2, -1)
        c, s = (z[rows, None, :, : size // 2].double() for z in (cos, sin))
        assert (y - torch.cat((a * c - b * s, b * c + a * s), -1)).abs().max() < 1e-6
        assert torch.equal(rotate(x[:1, 1:2, 3:4], cos[:1, 3:4], sin[:1, 3:4])[0, 0, 0], y[0, 1, 3])
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(rotate(strided, cos, sin), rotate(x, cos, sin))


@pytest.mark.parametrize("half", [1, 4, 15, 64])
def test_rope_angles(half):
    positions, frequencies = torch.tensor([[0, 1, 17], [3, 2047, 131071]]), 10000.0 ** -(torch.arange(half) / half)
    cos, sin = rope_angles(positions, frequencies, scale=1.25)
    angles = (positions[..., None].float() * frequencies).double()
    for found, function in ((cos, torch.cos), (sin, torch.sin)):
        exact = 1.25 * function(torch.cat((angles, angles), -1))
        assert found.shape == (2, 3, 2 * half) and (found - exact).abs().max() < 2e-7
    assert torch.equal(rope_angles(positions[1:, 2:], frequencies, scale=1.25)[0][0, 0], cos[1, 2])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1, 7, 64, 1027])
def test_gated(instruction_set, size, activation):
    gate, up = numbers(2, 3, size) * torch.logspace(-3, 3, size), numbers(2, 3, size, seed=1)
    y, wide = gated(gate, up, activation), gate.double()
    functions = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
    exact = functions[activation](wide) * up
    assert not ((y - exact).abs() > 1e-6 * (exact.abs() + gate.abs().clamp(max=1) * up.abs())).any()
    assert torch.equal(gated(gate[1:, 2:], up[1:, 2:], activation)[0, 0], y[1, 2])
    assert gated(torch.tensor([[[-(2.0**40), 2.0**40]]]), torch.ones(1, 1, 2), activation).tolist() == [
        [[0.0, 2.0**40]]
    ]


def test_other_activations_are_refused():
    with pytest.raises(ValueError, match="activation: got 'relu', allowed: 'silu', 'gelu_tanh'"):
        gated(numbers(1, 1, 2), numbers(1, 1, 2), "relu")


def test_a_fault_stays_in_its_row(instruction_set):
    x = numbers(4, 64)
    x[1, 3] = float("nan")
    y = rms_norm(x, None, 1e-6)
    assert y[1].isnan().all() and y[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: rms_norm(numbers(2, 4).double(), None, 1e-5), "x has a wrong shape"),
        (lambda: rms_norm(numbers(2, 4), numbers(5), 1e-5), "weight has a wrong shape"),
        (lambda: add_rms_norm(numbers(2, 4), numbers(4), None, 1e-5), "delta has another shape"),
        (lambda: add_rms_norm(numbers(2, 4), numbers(2, 4), numbers(5), 1e-5), "weight has a wrong shape"),
        (
            lambda: add_rms_norm(*[numbers(2, 4)] * 2, None, 1e-5, delta_weight=numbers(5), delta_epsilon=1e-5),
            "weight has a wrong shape",
        ),
        (lambda: rotate(numbers(1, 2, 3, 5), numbers(1, 3, 5), numbers(1, 3, 5)), "an odd size"),
        (lambda: rotate(numbers(2, 2, 3, 4), numbers(3, 3, 4), numbers(3, 3, 4)), "other rows than x"),
        (lambda: rotate(numbers(2, 2, 3, 4), numbers(2, 3, 4), numbers(2, 3, 2)), "sin has a wrong shape"),
        (lambda: rotate(numbers(2, 2, 4), numbers(2, 2, 4), numbers(2, 2, 4)), "x or cos has a wrong shape"),
        (lambda: rope_angles(numbers(1, 2), numbers(2)), "positions has a wrong"),
        (lambda: rope_angles(torch.tensor([1]), numbers(2)), "positions or frequencies has a wrong shape"),
        (lambda: gated(numbers(1, 2, 3), numbers(1, 2, 4), "silu"), "up has a wrong shape"),
        (lambda: gated(numbers(2, 3), numbers(2, 3), "silu"), "gate or up has a wrong shape"),
    ],
)
def test_wrong_tensors_are_refused(call, told):
    with pytest.raises(RuntimeError, match=f"specdec_layers: .*{told}"):
        call()


def test_nothing_to_compute():
    assert rms_norm(numbers(0, 8), numbers(8), 1e-5).shape == (0, 8)
    assert gated(numbers(2, 0, 4), numbers(2, 0, 4), "silu").shape == (2, 0, 4)
    assert rope_angles(torch.zeros(2, 0, dtype=torch.int64), numbers(3))[0].shape == (2, 0, 6)
    assert rotate(numbers(2, 3, 0, 4), numbers(2, 0, 4), numbers(2, 0, 4)).shape == (2, 3, 0, 4)


def test_their_schemas():
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(handle("rms_norm"), (numbers(2, 3, 8), numbers(8), 1e-5, 1.0), test_utils=checks)
    torch.library.opcheck(
        operation("add_rms_norm", "triton", DEVICE),
        (*[numbers(2, 3, 8).to(DEVICE)] * 2, numbers(8).to(DEVICE), 1e-5, 1.0, True, None, 0.0),
        test_utils=checks,
    )
    torch.library.opcheck(handle("rotate"), (numbers(2, 3, 4, 8), *[numbers(2, 4, 8)] * 2), test_utils=checks)
    torch.library.opcheck(handle("rope_angles"), (torch.tensor([[3, 4]]), numbers(4), 1.0), test_utils=checks)
    of_triton = torch.tensor([[3, 4]], device=DEVICE), numbers(4).to(DEVICE), 1.0, torch.float16
    torch.library.opcheck(operation("rope_angles", "triton", DEVICE), of_triton, test_utils=checks)
    torch.library.opcheck(handle("gated"), (*[numbers(2, 3, 8)] * 2, False), test_utils=checks)


# ---- by Triton: what a GPU's step has, and here its interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts numbers off that a GPU rounds to bfloat16.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


def by_triton(stem: str, *arguments: object):
    moved = [a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in arguments]
    found = operation(stem, "triton", DEVICE)(*moved)
    return tuple(x.cpu() for x in found) if isinstance(found, tuple) else found.cpu()


def nearly_equal(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """Few numbers are rounded to a neighbour of what they should be, once or twice; all others are equal."""
    if found.dtype == torch.float32:
        return torch.allclose(found, exact, rtol=2e-6, atol=1e-6)
    steps = (found.view(torch.int16).int() - exact.view(torch.int16).int()).abs()
    return found.dtype == exact.dtype and steps.max() <= 2 and (steps > 0).float().mean() < 0.02


def part_of(x: torch.Tensor, more: int = 3) -> torch.Tensor:
    """The same numbers as a part of a wider tensor, as layers beside each other have them of one product."""
    return F.pad(x, (more, more), value=float("nan"))[..., more:-more]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 100, 576])
def test_rms_norm_by_triton(dtype, size):
    """As transformers' modules compute it: Llama's rounds before the weights, Gemma's after them."""
    x, weight = (numbers(3, 5, size) * torch.logspace(-2, 2, 5)[:, None]).to(dtype), numbers(size, seed=1).to(dtype)
    wide = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    exact = {
        (0.0, True): weight * wide.to(dtype),
        (0.0, False): (weight.float() * wide).to(dtype),
        (1.0, False): ((weight.float() + 1.0) * wide).to(dtype),
    }
    for (offset, first), expected in exact.items():
        y = by_triton("rms_norm", x, weight, 1e-5, offset, first)
        assert nearly_equal(y, expected)
        alone = by_triton("rms_norm", x[1:2, 2:4], weight, 1e-5, offset, first)
        assert torch.equal(alone[0], y[1, 2:4])
    assert nearly_equal(by_triton("rms_norm", x, None, 1e-5, 0.0, False), wide.to(dtype))
    own = by_triton("rms_norm", x, weight, 1e-5, 0.0, True)
    for other in (x.transpose(0, 1).contiguous().transpose(0, 1), part_of(x), part_of(x.mT).mT):
        assert torch.equal(by_triton("rms_norm", other, weight, 1e-5, 0.0, True), own)
    assert torch.equal(by_triton("rms_norm", x[1, 2], weight, 1e-5, 0.0, True), own[1, 2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 100, 576])
def test_add_rms_norm_by_triton(dtype, size):
    """With the bits of an addition, rounded as PyTorch rounds it, and a norm, or of two."""
    x, delta = (numbers(3, 5, size, seed=i).to(dtype) for i in range(2))
    weight, its_own = (numbers(size, seed=i).to(dtype) for i in (2, 3))
    strided = delta.transpose(0, 1).contiguous().transpose(0, 1)
    for offset, first in ((0.0, True), (0.0, False), (1.0, False)):
        for own, added in ((None, delta), (its_own, by_triton("rms_norm", delta, its_own, 1e-3, offset, first))):
            for given in (delta, strided):
                total, y = by_triton("add_rms_norm", x, given, weight, 1e-5, offset, first, own, 1e-3)
                assert torch.equal(total, x + added) and total.dtype == y.dtype == dtype
                assert torch.equal(y, by_triton("rms_norm", x + added, weight, 1e-5, offset, first))
    total, y = by_triton("add_rms_norm", x, delta, None, 1e-5, 0.0, False, None, 0.0)
    assert torch.equal(y, by_triton("rms_norm", x + delta, None, 1e-5, 0.0, False))
    _, alone = by_triton("add_rms_norm", x[1:2, 2:4], delta[1:2, 2:4], None, 1e-5, 0.0, False, None, 0.0)
    assert torch.equal(alone[0], y[1, 2:4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 30, 64])
def test_rotate_by_triton(dtype, size):
    x, angles = numbers(3, 4, 5, size).to(dtype), numbers(3, 5, size // 2, seed=1) * 3
    cos, sin = (torch.cat((f(angles), f(angles)), -1).to(dtype) for f in (torch.cos, torch.sin))
    for rows in (slice(0, 3), slice(0, 1)):
        a, b = x.chunk(2, -1)
        exact = x * cos[rows, None] + torch.cat((-b, a), -1) * sin[rows, None]
        y = by_triton("rotate", x, cos[rows], sin[rows])
        # Of float32, a compiler may round a product and a sum at once.
        assert torch.allclose(y, exact, atol=1e-6) if dtype == torch.float32 else torch.equal(y, exact)
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(by_triton("rotate", strided, cos, sin), by_triton("rotate", x, cos, sin))
    assert torch.equal(by_triton("rotate", part_of(x), cos, sin), by_triton("rotate", x, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [1, 15, 64])
def test_rope_angles_by_triton(dtype, half):
    """As transformers' modules compute them: in float32, and then rounded to the dtype of the numbers."""
    positions, frequencies = torch.tensor([[0, 1, 17], [3, 2047, 131071]]), 10000.0 ** -(torch.arange(half) / half)
    angles = (positions[..., None].float() * frequencies).repeat(1, 1, 2)
    found = by_triton("rope_angles", positions, frequencies, 1.25, dtype)
    for y, exact in zip(found, (angles.cos() * 1.25, angles.sin() * 1.25), strict=True):
        assert y.shape == (2, 3, 2 * half) and nearly_equal(y, exact.to(dtype))
    columns = positions.repeat(1, 2).split(3, 1)[1]  # as a step's positions are divided by forwards
    for given, own in ((columns, found[0]), (columns[1:, 2:], found[0][1:, 2:])):
        assert torch.equal(by_triton("rope_angles", given, frequencies, 1.25, dtype)[0], own)


class Launches:
    """Stands for a kernel, and keeps the tensors of each launch."""

    def __init__(self, made: list):
        self.made = made

    def __getitem__(self, grid):
        return lambda *given, **options: self.made.append([x for x in given if isinstance(x, torch.Tensor)])


def test_parts_of_a_product_are_read_where_they_are(monkeypatch):
    """A copy would be one more launch for each."""
    launched: list = []
    for name in ("gated_kernel", "rms_norm_kernel", "rotate_kernel"):
        monkeypatch.setattr(elementwise, name, Launches(launched))
    angles, (first, second) = torch.zeros(2, 3, 8), numbers(2, 3, 128).split(64, -1)
    heads = second.unflatten(-1, (8, 8))
    elementwise.gated(first, second, False)
    elementwise.rms_norm(heads, numbers(8), 1e-5, 0.0, False)
    elementwise.rotate(heads.transpose(1, 2), angles, angles)
    places = [[x.data_ptr() for x in given] for given in launched]
    assert [given[0] for given in places] == [first.data_ptr(), second.data_ptr(), second.data_ptr()]
    assert places[0][1] == second.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
def test_gated_by_triton(dtype, gelu):
    gate, up = (numbers(2, 3, 700) * torch.logspace(-3, 1.5, 700)).to(dtype), numbers(2, 3, 700, seed=1).to(dtype)
    exact = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    y = by_triton("gated", gate, up, gelu)
    assert nearly_equal(y, exact) or (y - exact).abs().max() <= 2e-5 * exact.abs().max()
    assert torch.equal(by_triton("gated", gate[1:, 2:], up[1:, 2:], gelu)[0, 0], y[1, 2])
    assert torch.equal(by_triton("gated", part_of(gate), part_of(up, 5), gelu), y)
    assert torch.equal(by_triton("gated", gate, part_of(up.mT).mT, gelu), y)
    large = torch.tensor([[[-(2.0**14), 2.0**14]]], dtype=dtype)
    assert by_triton("gated", large, torch.ones_like(large), gelu).tolist() == [[[0.0, 2.0**14]]]


def test_what_triton_refuses():
    x = numbers(2, 3, 8)
    for arguments in (("rms_norm", x, numbers(7), 1e-5, 0.0, False), ("gated", x, x.half(), False)):
        with pytest.raises(RuntimeError, match="(weight|up) has a wrong shape, dtype or device"):
            by_triton(*arguments)
    for delta, weight in ((numbers(2, 3, 1), None), (x.half(), None), (x, numbers(7))):
        with pytest.raises(RuntimeError, match="(delta|delta_weight) has a wrong shape, dtype or device"):
            by_triton("add_rms_norm", x, delta, numbers(8), 1e-5, 0.0, False, weight, 1e-5)
    with pytest.raises(RuntimeError, match="sin has a wrong shape, dtype or device"):
        by_triton("rotate", x[None], numbers(1, 3, 8), numbers(1, 3, 6))
    for positions, frequencies in ((numbers(2, 3), numbers(4)), (torch.tensor([[1]]), numbers(1, 4))):
        with pytest.raises(RuntimeError, match="(positions|frequencies) has a wrong shape"):
            by_triton("rope_angles", positions, frequencies, 1.0, torch.float32)
    with pytest.raises(ValueError, match="dtype: got torch.float16, allowed: torch.float32 on 'cpu'"):
        rope_angles(torch.tensor([[1]]), numbers(4), dtype=torch.float16)
