"""The machine code of the CUDA kernels: the one that measures is short for each block of 1,024 logits, the others are
small and leave room for each other on a multiprocessor, and nothing is spilled. Times need a GPU; instructions are
exact without one.

A multiprocessor of an H200 can issue 496 instructions while a block of logits arrives. With as many as here, ncu saw
half of these slots used (docs/cuda.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from support import sass
from support.machine_code import compiled
from support.ptxas import NVCC

BYTES = 16  # of an instruction


def has(pattern: str) -> Callable[[sass.Block], bool]:
    return lambda block: any(re.match(pattern, i.opcode) for i in block.instructions)


MEASURE = {f"measure_kernel<Plain<{f}, false>>(Work)" for f in ("BFloat16", "Float16", "Float32")}
# The rules are 0 (`token`) and 1 (`block`); the mixes that matter most, how many kilobytes of code they may have, and
# how many registers, so that two blocks of threads share a multiprocessor, of `select` three, of `sums` four.
SMALL = {
    "decide_kernel<Plain<BFloat16, true>, 0>(Work)": (48, 72),
    "decide_kernel<Plain<Float16, true>, 0>(Work)": (48, 72),
    "decide_kernel<Plain<BFloat16, true>, 1>(Work)": (55, 72),
    "select_kernel<Plain<BFloat16, true>>(Work)": (84, 80),
    "sums_kernel<Plain<BFloat16, true>>(Work)": (27, 64),
}


@pytest.mark.nvcc
@pytest.mark.skipif(NVCC is None, reason="nvcc is not there")
def test_measuring_a_block_takes_few_instructions(tmp_path):
    """From the kernel's beginning to its end, where a block is whole and begins with 16 aligned bytes."""
    for kernel in compiled(sorted(MEASURE), "sm_90a", tmp_path).values():
        run = sass.shortest_run(kernel.blocks, [has(r"LDG.*\.128"), has(r"MUFU\.EX2"), has("STG")], lambda _: False)
        assert sum(i.opcode == "MUFU.EX2" for i in run) >= 32  # of one block
        assert 0 < len(run) <= 246 and kernel.spilled == 0, kernel.name
        assert not [i for i in kernel.instructions if i.name in ("BAR", "LDS", "STS")], kernel.name


@pytest.mark.nvcc
@pytest.mark.skipif(NVCC is None, reason="nvcc is not there")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_what_follows_is_small(architecture, tmp_path):
    for kernel in compiled(sorted(SMALL), architecture, tmp_path).values():
        kilobytes, registers = SMALL[kernel.name]
        assert len(kernel.instructions) * BYTES <= kilobytes * 1024, kernel.name
        assert kernel.spilled == 0 and kernel.registers <= registers, kernel.name
        # Shared memory is known to be that: generic loads would be slower.
        assert not [i for i in kernel.instructions if re.match(r"(LD|ST)\.E", i.opcode)], kernel.name


# Of products for so many tiles of 8 rows: instructions a kilobyte of weights, of which an H200 can issue 248 while it
# arrives, and registers, so that three blocks share a multiprocessor, or two: 64 KB of weights are on their way.
PRODUCTS = {
    f"linear_kernel<{f}, {tiles}, {form}, {stored}Weights>(LinearParams)": (tiles, most, 80 if tiles == 1 else 128)
    for f in ("BFloat16", "Float16")
    for stored, forms in {
        "Float": {"Alone": (20, 32), "Added": (20, 32), "Normed": (84, 140), "Gated": (84, 140)},
        "Int8": {"Alone": (56, 64), "Added": (56, 64), "Normed": (180, 272), "Gated": (180, 272)},
    }.items()
    for form, of_tiles in forms.items()
    for tiles, most in zip((1, 2), of_tiles, strict=True)
}


@pytest.mark.nvcc
@pytest.mark.skipif(NVCC is None, reason="nvcc is not there")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
def test_products_stream_their_weights(architecture, tmp_path):
    """The loop over the inputs loads 4 KB of weights a turn, 16 bytes a lane, while it multiplies those of the turn
    before."""
    for kernel in compiled(sorted(PRODUCTS), architecture, tmp_path).values():
        (loop,) = [
            loop
            for loop in sass.loops(kernel.blocks)
            if any(has("HMMA")(kernel.blocks[number]) for number in loop.body)
        ]
        turn = sass.shortest_turn(kernel.blocks, loop, [has("HMMA")])
        (tiles, most, registers), normed = PRODUCTS[kernel.name], "Normed" in kernel.name or "Gated" in kernel.name
        weights = [i for i in turn if re.match(r"LDG.*LTC128B.*\.128", i.opcode)]
        of_x = 8 if "Int8" in kernel.name else 4  # a kilobyte of bytes is of twice as many inputs
        assert len(weights) == 8 and sum(i.name == "LDG" for i in turn) == 8 + of_x * (tiles + normed), kernel.name
        assert all(".128" in i.opcode for i in turn if i.name == "LDG"), kernel.name
        assert sum(i.name == "HMMA" for i in turn) == 2 * of_x * tiles and len(turn) <= 4 * most, (
            kernel.name,
            len(turn),
        )
        assert kernel.spilled == 0 and kernel.registers <= registers, kernel.name


# ---- How a listing is read

SOURCE = """\
SPECDEC_DEVICE float larger(float a, float b) { return a > b ? a : b; }

SPECDEC_KERNEL(some_kernel, 32, Work) {
  for (int i = 0; i < n; ++i) {
    max = larger(max, x[i]);
    if (has_table) adjust(x);
  }
}
"""
LISTING = """\
.text.some_kernel:
        //## File "{file}", line 4
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        //## File "{file}", line 1 inlined at "{file}", line 5
        //## File "{file}", line 5
        /*0010*/                   FMNMX R2, R2, R3, !PT ;
        //## File "{file}", line 6
        /*0020*/              @!P0 BRA `(.L_x_1) ;
        /*0030*/                   IADD3 R4, R4, 0x1, RZ ;
.L_x_1:
        //## File "{file}", line 4
        /*0040*/               @P1 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
"""


@pytest.fixture
def blocks(tmp_path) -> list[sass.Block]:
    file = tmp_path / "kernel.h"
    file.write_text(SOURCE)
    (found,) = sass.kernels(LISTING.format(file=file)).values()
    return found


def test_blocks_loops_and_places_are_read(blocks):
    assert [[i.name for i in block.instructions] for block in blocks] == [
        ["MOV"], ["FMNMX", "BRA"], ["IADD3"], ["BRA"], ["EXIT"]
    ]  # fmt: skip
    assert [sorted(block.next) for block in blocks] == [[1], [2, 3], [3], [1, 4], []]
    assert sass.loops(blocks) == [sass.Loop(1, frozenset({1, 2, 3}))]
    largest, branch = blocks[1].instructions
    assert largest.within("larger") and largest.within("some_kernel") and not branch.within("larger")
    assert [place.line for place in largest.places] == [1, 5] and "adjust(x)" in branch.places[0].text


def test_the_shortest_turn_and_run(blocks):
    (loop,) = sass.loops(blocks)

    def turn(*names: str) -> list[str]:
        through = [lambda block, name=name: any(i.name == name for i in block.instructions) for name in names]
        return [i.name for i in sass.shortest_turn(blocks, loop, through)]

    def run(avoided: str) -> list[str]:
        return [i.name for i in sass.shortest_run(blocks, [], lambda block: block.instructions[0].name == avoided)]

    assert turn() == turn("FMNMX") == ["FMNMX", "BRA", "BRA"] and turn("MUFU") == []
    assert turn("IADD3") == ["FMNMX", "BRA", "IADD3", "BRA"]
    assert run("none") == run("IADD3") == ["MOV", "FMNMX", "BRA", "BRA", "EXIT"] and run("FMNMX") == []
