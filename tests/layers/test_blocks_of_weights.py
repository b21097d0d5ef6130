"""Weights in GGUF's blocks: what they stand for, their order for kernels, and products by them: of inputs that are
rounded to 16 bits, with the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch
from specdec_layers import Packing, dequantise, interleave, linear, linears, quantise, stored_rows
from specdec_layers.ops import handle

PACKINGS = [packing for packing in Packing if packing.is_of_blocks]
SCALES = {Packing.Q4_1: (0, 2), Packing.Q4_K: (0, 2), Packing.Q6_K: (208,)}  # where a block has float16 numbers


def blocks_of(packing: Packing, rows: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """Random bytes, but for scales, which are finite, of either sign, and some of them subnormal."""
    number, size = packing.block
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, inputs // number, size), dtype=torch.uint8, generator=generator)
    for first in SCALES.get(packing, (0,)):
        blocks[..., first + 1] &= 0b10110011  # an exponent of less than 13 of 31
    return blocks.view(rows, -1)


def inputs_of(rows: int, inputs: int) -> torch.Tensor:
    return torch.randn(1, rows, inputs, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_numbers_are_those_of_gguf(packing):
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType(int(packing))
    assert (gguf.GGML_QUANT_SIZES[kind]) == packing.block
    blocks = blocks_of(packing, 9, 1024)
    theirs, ours = torch.from_numpy(gguf.dequantize(blocks.numpy(), kind)), dequantise(blocks, packing)
    assert ours.shape == (9, 1024) and torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    assert torch.equal(dequantise(blocks.view(3, 3, -1), packing), ours.view(3, 3, -1))
    if packing in (Packing.Q8_0, Packing.Q4_0):
        numbers = torch.randn(9, 256) * torch.logspace(-4, 3, 9)[:, None]
        numbers[3, 32:64] = 0
        numbers[4] = torch.arange(256) % 32 - 15.5
        numbers[4, ::32] = 127  # the others are halves between two quants
        assert torch.equal(quantise(numbers, packing), torch.from_numpy(gguf.quantize(numbers.numpy(), kind)))


def test_numbers_by_hand():
    """One of each part of a block, without gguf."""
    halves = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -2.5, *[0.0] * 26])
    assert dequantise(quantise(halves, Packing.Q8_0), Packing.Q8_0)[:6].tolist() == [127, 1, 2, 3, -1, -3]
    half = torch.tensor([0.5], dtype=torch.float16).view(torch.uint8).tolist()
    eights = torch.tensor([*half, *[255, 1], *[0] * 30], dtype=torch.uint8)
    assert dequantise(eights, Packing.Q8_0)[:3].tolist() == [-0.5, 0.5, 0]
    nibbles = torch.tensor([*half, 0x1F, *[0x88] * 15], dtype=torch.uint8)
    assert dequantise(nibbles, Packing.Q4_0)[[0, 1, 16, 17]].tolist() == [3.5, 0, -3.5, 0]
    nibbles = torch.tensor([*half, *half, 0x1F, *[0] * 15], dtype=torch.uint8)
    assert dequantise(nibbles, Packing.Q4_1)[[0, 1, 16]].tolist() == [8, 0.5, 1]
    # Scale 2 of the first 32 weights, and 33 of the fifth: 1 in the last bytes, and 2 in the first byte's upper bits.
    scales = [0x82, 0, 0, 0, 1, 0, 0, 0, 0x01, 0, 0, 0]
    quants = [0x23, *[0] * 63, 0x04, *[0] * 63]
    numbers = dequantise(torch.tensor([*half, *half, *scales, *quants], dtype=torch.uint8), Packing.Q4_K)
    assert numbers[[0, 1, 32, 128]].tolist() == [0.5 * 2 * 3 - 0.5, -0.5, 0, 0.5 * 33 * 4]
    lower, upper, scales = [0x21, *[0] * 127], [0b10010011, *[0] * 63], [1, 0, 2, 0, 3, 0, 4, *[0] * 9]
    numbers = dequantise(torch.tensor([*lower, *upper, *scales, *half], dtype=torch.uint8), Packing.Q6_K)
    assert numbers[[0, 32, 64, 96, 1]].tolist() == [0.5 * (0x31 - 32), -32, 0.5 * 3 * (0x12 - 32), 2 * (0x20 - 32), -16]


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What a product is computed with."""
    parts = x.unflatten(-1, (-1, 32)).double()
    scale = parts.abs().amax(-1, keepdim=True).log2().floor().exp2() * 2.0**-14
    return torch.where(scale > 0, (parts / scale).round().clamp(max=32767) * scale, 0).flatten(-2)


def test_rows_are_interleaved():
    for rows in (1, 15, 16, 37):
        blocks = blocks_of(Packing.Q4_0, rows, 64)
        found, last = interleave(blocks), rows // 16 * 16
        for row in range(rows):
            first, beside, place = (row // 16 * 16, 16, row % 16) if row < last else (last, rows - last, row - last)
            tile = found.flatten()[first * 36 :][: beside * 36].view(18, beside, 2)
            assert torch.equal(tile[:, place].flatten(), blocks[row]), row


@pytest.mark.parametrize("packing", PACKINGS)
def test_stored_rows(packing, instruction_set):
    for rows in (1, 15, 16, 37):
        blocks = blocks_of(packing, rows, 512)
        expected, every = dequantise(blocks, packing), torch.arange(rows)
        assert torch.equal(stored_rows(interleave(blocks), every, packing), expected)
        some = torch.tensor([[rows - 1, 0], [0, rows // 2]])
        assert torch.equal(stored_rows(interleave(blocks), some, packing), expected[some])
        for none in (-1, rows):
            with pytest.raises(RuntimeError, match="rows has a number that is no row of weight"):
                stored_rows(interleave(blocks), torch.tensor([0, none]), packing)
    with pytest.raises(RuntimeError, match="wrong shape"):
        stored_rows(blocks[:, 1:], every, packing)
    with pytest.raises(RuntimeError, match="rows has a wrong dtype"):
        stored_rows(interleave(blocks), every.int(), packing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_rows_of_numbers(dtype):
    weight, rows = torch.randn(50, 7).to(dtype), torch.tensor([[3, 49, 0]])
    weight[3, :4] = torch.tensor([torch.inf, -torch.inf, 2.0**-20, 0])
    assert torch.equal(stored_rows(weight, rows), weight[rows].float())
    assert stored_rows(weight, rows[:, :0]).shape == (1, 0, 7)


def test_inputs_are_rounded(instruction_set):
    """By weights that are 1 on the diagonal."""
    blocks = torch.zeros(64, 2, 34, dtype=torch.uint8)
    blocks[:, :, :2] = torch.tensor([0x00, 0x3C])  # scales of 1
    blocks[range(64), torch.arange(64) // 32, 2 + torch.arange(64) % 32] = 1
    weight, x = interleave(blocks.view(64, -1)), torch.randn(1, 9, 64)
    x[0, 0] = 0
    x[0, 0, :8] = torch.tensor([16385, 0.5, 1.5, 2.5, -0.5, -2.5, -1.5, 16384.5])  # halves go to even integers
    x[0, 1, :32] = torch.tensor([32767.75, -32767.75]).repeat(16)
    x[0, 2, :32] *= 2.0**-101  # all below 2^-98
    x[0, 2, :32] = x[0, 2, :32].clamp(-(2.0**-101), 2.0**-101)
    x[0, 3] *= 1e30
    x[0, 4, 40], x[0, 5, 3], x[0, 6, 3] = torch.inf, torch.nan, -torch.inf
    found = linear(x, weight, None, Packing.Q8_0)[0]
    assert found[0, :8].tolist() == [16385, 0, 2, 2, 0, -2, -2, 16384] and not found[0, 8:].any()
    assert set(found[1, :32].tolist()) == {32767, -32768}
    assert not found[2, :32].any() and found[2, 32:].all()
    assert found[4:7].isnan().all(), "a sum over all inputs"
    for row in (0, 1, 3, 7, 8):
        assert torch.equal(found[row], rounded(x[0, row]).float()), row
    assert ((found[7:] - x[0, 7:]).abs() <= 2.0**-15 * x[0, 7:].abs().max()).all() and (found[7:] != x[0, 7:]).any()


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_product_is_that_of_the_numbers_and_rounded_inputs(instruction_set, packing):
    """Whatever the number of rows, of outputs, and the place of an output among the others."""
    for inputs, outputs in ((256, 1), (768, 35), (1536, 16)):
        blocks, bias = blocks_of(packing, outputs, inputs), torch.randn(outputs)
        numbers, x = dequantise(blocks, packing).double(), inputs_of(40, inputs)
        own = rounded(x)
        found, exact = linear(x, interleave(blocks), bias, packing), own @ numbers.T + bias
        assert ((found - exact).abs() <= 4e-7 * (own.abs() @ numbers.abs().T + bias.abs())).all(), (inputs, outputs)
        for rows in (*range(1, 10), 11, 13, 17):
            assert torch.equal(linear(x[:, :rows], interleave(blocks), bias, packing), found[:, :rows]), rows
            last = x[:, 40 - rows :].contiguous()
            assert torch.equal(linear(last, interleave(blocks), bias, packing), found[:, 40 - rows :]), rows
        for some in {0, outputs // 2, outputs - 1}:
            alone = linear(x, interleave(blocks[some:]), bias[some:], packing)
            assert torch.equal(alone, found[..., some:])


def test_the_largest_sums_are_exact(instruction_set):
    """Of all formats' extreme integers, in all inputs, by the largest inputs."""
    x = torch.tensor([32767.0, -32767.0]).repeat(1, 1, 128)
    for packing, byte, weight in ((Packing.Q8_0, 0x80, -128), (Packing.Q4_0, 0, -8), (Packing.Q4_1, 0xFF, 15)):
        blocks = torch.full((3, 256 // 32, packing.block[1]), byte, dtype=torch.uint8)
        blocks[..., :2] = torch.tensor([0x00, 0x3C])  # a scale of 1
        if packing == Packing.Q4_1:
            blocks[..., 2:4] = 0
        for signs in (x, x.abs(), -32768 * torch.ones_like(x)):
            found = linear(signs, interleave(blocks.view(3, -1)), None, packing)
            assert torch.equal(found, torch.full((1, 1, 3), signs.double().sum().item() * weight)), packing


def test_rows_of_one_block(instruction_set):
    for packing in (Packing.Q4_0, Packing.Q4_1, Packing.Q8_0):
        for inputs in (32, 96):
            blocks, x = blocks_of(packing, 5, inputs), inputs_of(3, inputs)
            exact = (rounded(x) @ dequantise(blocks, packing).double().T).float()
            torch.testing.assert_close(linear(x, interleave(blocks), None, packing), exact, rtol=1e-5, atol=1e-5)


def test_float16(instruction_set):
    """Its subnormal numbers and infinity as well, whichever way they are read."""
    weight = torch.randn(9, 100).half()
    weight[0, 0], weight[1, 1], weight[2, 99], weight[3, 3] = 2**-24, -(2**-15), 65504, torch.inf
    for rows in (1, 5, 9, 20):
        x = inputs_of(rows, 100)
        assert torch.equal(linear(x, weight), linear(x, weight.float()))


def test_layers_of_several_packings_together(instruction_set):
    """As where queries, keys and values of one file are stored in different ways; also on two threads."""
    packings, x = [*PACKINGS, Packing.NONE, Packing.NONE], inputs_of(3, 512)
    weights = [interleave(blocks_of(packing, 30 + i, 512, seed=i)) for i, packing in enumerate(PACKINGS)]
    weights += [torch.randn(7, 512), torch.randn(5, 512).half()]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = linears(x, weights, [None] * 7, packings)
    finally:
        torch.set_num_threads(threads)
    for y, weight, packing in zip(found, weights, packings, strict=True):
        assert torch.equal(y, linear(x, weight, None, packing))


def test_blocks_at_any_address(instruction_set):
    memory = torch.zeros(1 + 5 * 8 * 34, dtype=torch.uint8)
    memory[1:] = (blocks := interleave(blocks_of(Packing.Q8_0, 5, 256))).flatten()
    x = inputs_of(2, 256)
    assert torch.equal(linear(x, memory[1:].view(5, -1), None, Packing.Q8_0), linear(x, blocks, None, Packing.Q8_0))


@pytest.mark.parametrize(
    ("weight", "packing", "message"),
    [
        (torch.zeros(3, 34, dtype=torch.uint8), Packing.Q4_0, "weight has a wrong shape or dtype"),
        (torch.zeros(3, 18, dtype=torch.int8), Packing.Q4_0, "weight has a wrong shape or dtype"),
        (torch.zeros(3, 32), Packing.Q4_0, "weight has a wrong shape or dtype"),
        (torch.zeros(3, 18, dtype=torch.uint8), Packing.NONE, "weight has a wrong shape or dtype"),
        (
            torch.zeros(3, 144, dtype=torch.uint8),
            Packing.Q4_K,
            "weight is packed in blocks of 256 inputs, and x has 32",
        ),
        (torch.zeros(3, 32), 1, "packing is 1, which is none that there is"),
        (torch.zeros(3, 32), 7, "packing is 7, which is none that there is"),
    ],
)
def test_wrong_weights_are_refused(weight, packing, message):
    with pytest.raises(RuntimeError, match=f"specdec_layers: {message}"):
        linear(torch.ones(1, 1, 32), weight, None, packing)


def test_other_packings_than_weights_are_refused():
    with pytest.raises(RuntimeError, match="there are other packings than weights"):
        linears(torch.ones(1, 1, 4), [torch.ones(3, 4)], [None], [])


def test_wrong_blocks_and_numbers_are_refused():
    for blocks, packing, name in (
        (torch.zeros(33, dtype=torch.uint8), Packing.Q8_0, "blocks"),
        (torch.zeros(34, dtype=torch.int8), Packing.Q8_0, "blocks"),
        (torch.zeros(34, dtype=torch.uint8), Packing.NONE, "packing"),
    ):
        with pytest.raises(ValueError, match=f"{name}: got .*, allowed: "):
            dequantise(blocks, packing)
    for numbers, packing, name in (
        (torch.zeros(33), Packing.Q8_0, "numbers"),
        (torch.zeros(32, dtype=torch.int32), Packing.Q4_0, "numbers"),
        (torch.zeros(256), Packing.Q4_K, "packing"),
    ):
        with pytest.raises(ValueError, match=f"{name}: got .*, allowed: "):
            quantise(numbers, packing)


def test_its_fake_has_its_shape():
    arguments = (torch.randn(2, 3, 64), [blocks_of(Packing.Q8_0, 5, 64)], [None], [int(Packing.Q8_0)])
    torch.library.opcheck(handle("linear"), arguments, test_utils=("test_schema", "test_faketensor"))
