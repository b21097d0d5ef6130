"""Weights in GGUF's blocks: what they stand for, and that a product by them is that by the float32 weights, to the last
bit."""

from __future__ import annotations

import pytest
import torch

from specdec_kernels import Packing, dequantise, linear, linears, quantise
from specdec_kernels.ops import handle

PACKINGS = [packing for packing in Packing if packing != Packing.NONE]
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


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_product_is_that_of_the_numbers(instruction_set, packing):
    """Whatever the number of rows, of outputs, and the place of an output among the others."""
    for inputs, outputs in ((256, 1), (768, 13), (1536, 6)):
        blocks, bias = blocks_of(packing, outputs, inputs), torch.randn(outputs)
        numbers, x = dequantise(blocks, packing), inputs_of(40, inputs)
        for rows in (*range(1, 10), 11, 13, 17, 40):
            found = linear(x[:, :rows], blocks, bias, packing)
            assert torch.equal(found, linear(x[:, :rows], numbers, bias)), (inputs, outputs, rows)
    assert torch.equal(linear(x, blocks[1:], None, packing), linear(x, numbers, None)[..., 1:])


def test_rows_of_one_block(instruction_set):
    for packing in (Packing.Q4_0, Packing.Q4_1, Packing.Q8_0):
        for inputs in (32, 96):
            blocks, x = blocks_of(packing, 5, inputs), inputs_of(3, inputs)
            assert torch.equal(linear(x, blocks, None, packing), linear(x, dequantise(blocks, packing)))


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
    weights = [blocks_of(packing, 30 + i, 512, seed=i) for i, packing in enumerate(PACKINGS)]
    weights += [torch.randn(7, 512), torch.randn(5, 512).half()]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = linears(x, weights, [None] * 7, packings)
    finally:
        torch.set_num_threads(threads)
    for y, weight, packing in zip(found, weights, packings, strict=True):
        assert torch.equal(y, linear(x, dequantise(weight, packing) if packing else weight.float()))


def test_blocks_at_any_address(instruction_set):
    """As those of a file that is mapped into memory."""
    memory = torch.zeros(1 + 5 * 8 * 34, dtype=torch.uint8)
    memory[1:] = (blocks := blocks_of(Packing.Q8_0, 5, 256)).flatten()
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
    with pytest.raises(RuntimeError, match=f"specdec_kernels: {message}"):
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
