"""The machine code of the CUDA kernels: the loop that measures a block of 1,024 logits is short, nothing is spilled,
and a step meets few barriers. Times need a GPU; instructions are exact without one.

A GPU has time for few instructions while a block of logits arrives: an H100's multiprocessor issues at most 640 in it,
and an H200's 445. docs/cuda.md says more.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from support import sass
from support.machine_code import Kernel, compiled
from support.ptxas import NVCC

SOURCES = ("speculative_step", "draft_step", "verify_tree", "draft_children")
LOGITS = 32  # of a block that a thread has


def has(pattern: str) -> Callable[[sass.Block], bool]:
    return lambda block: any(re.match(pattern, i.opcode) for i in block.instructions)


def within(*functions: str) -> Callable[[sass.Block], bool]:
    return lambda block: any(all(map(i.within, functions)) for i in block.instructions)


# What the shortest turn for a whole block of bfloat16 logits runs through, by where blocks come from: they stay in
# shared memory, come through its ring of slots, or are read in place.
MAXIMUM, EXPONENTIAL = has(r"HMNMX2\.BF16"), has(r"MUFU\.EX2")
WAIT, COPY = has(r"SYNCS\.PHASECHK"), has(r"UBLKCP")
ORIGINS = {
    "stay": (MAXIMUM, EXPONENTIAL, WAIT),
    "ring": (MAXIMUM, EXPONENTIAL, WAIT, COPY),
    "in place": (MAXIMUM, EXPONENTIAL),
}
# What the shortest run of a kernel goes through, without filters: a step of rule `token` that rejects a draft, and a
# draft; and how many barriers of the cluster and fences it may meet.
RUNS = {
    "speculative_step_kernel": ((*ORIGINS["stay"], within("walk", "publish"), within("write_step")), 3, 2),
    "draft_step_kernel": ((*ORIGINS["stay"], within("draw_by"), within("write_draft")), 2, 1),
}


def measuring_turn(kernel: Kernel, origin: str) -> list[sass.Instruction]:
    """The instructions that compute the statistics of a block of logits; [] if the kernel does not."""
    turns = (sass.shortest_turn(kernel.blocks, loop, ORIGINS[origin]) for loop in sass.loops(kernel.blocks))
    return next((turn for turn in turns if turn), [])


def histogram_turn(kernel: Kernel) -> int:
    """The instructions that a filter's histogram takes for 1,024 logits that are already loaded, all of them in its
    interval; 0 if the kernel has none. Its loop is unrolled, so each logit's are those between one addition of low
    halves and the next."""
    every = kernel.instructions
    additions = [at for at, i in enumerate(every) if i.name in ("ATOM", "ATOMS") and i.within("add")]
    # Of each logit in turn, the low and the high half; the list's logits have two more additions elsewhere.
    for begin in range(len(additions) - 2 * LOGITS + 1):
        low_halves = additions[begin : begin + 2 * LOGITS : 2]
        steps = [after - before for before, after in pairwise(low_halves)]
        if max(steps) <= 2 * min(steps):
            return LOGITS * (low_halves[-1] - low_halves[0]) // (LOGITS - 1)
    return 0


def without_cluster(block: sass.Block) -> bool:
    """Whether the compiler added the block to a cluster's barrier for launches that have no clusters."""
    added = (i for i in block.instructions if i.name in ("BAR", "NOP"))
    return any(i.within(half) for i in added for half in ("arrive_cluster", "wait_cluster"))


def is_exponential_or_sum(instruction: sass.Instruction) -> bool:
    if instruction.name == "MUFU" or instruction.within("weight_of") or instruction.within("exp2_of"):
        return True
    return bool(instruction.places) and re.search(r"\bsum \+=", instruction.places[0].text) is not None


@pytest.mark.nvcc
@pytest.mark.skipif(NVCC is None, reason="nvcc is not there")
@pytest.mark.parametrize("source", SOURCES)
def test_the_measuring_loop_is_short(source, tmp_path):
    kernels = {k.name: k for k in compiled(source, "sm_90a", tmp_path) if "measure" not in k.name}
    for kernel in kernels.values():
        turn = measuring_turn(kernel, "stay")
        assert len(turn) <= 300 and kernel.spilled == 0
        assert not any(i.opcode.startswith("ATOMS.CAS") for i in kernel.instructions)  # an addition that is a loop
        assert sum(map(is_exponential_or_sum, turn)) >= 4 * LOGITS  # of one block
    step = kernels[f"{source}_kernel"]
    elsewhere = "in place" if source == "verify_tree" else "ring"
    assert 0 < len(measuring_turn(step, elsewhere)) <= 350 and 0 < histogram_turn(step) <= 1100
    if step.name in RUNS:
        through, barriers, fences = RUNS[step.name]
        run = sass.shortest_run(step.blocks, through, without_cluster)
        assert 0 < sum(i.name == "UCGABAR_WAIT" for i in run) <= barriers
        assert 0 < sum(i.opcode == "MEMBAR.ALL.GPU" for i in run) <= fences


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
