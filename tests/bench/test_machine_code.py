"""machine_code.py: how it reads a listing, what it takes for a loop's path, and the counts that the kernels have."""

from __future__ import annotations

import dataclasses

import machine_code
import predicted_times
import pytest
import sass
import step_counts
import torch
from ptxas import NVCC

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


def test_blocks_and_loops(blocks):
    assert [[i.name for i in block.instructions] for block in blocks] == [
        ["MOV"], ["FMNMX", "BRA"], ["IADD3"], ["BRA"], ["EXIT"]
    ]  # fmt: skip
    assert [sorted(block.next) for block in blocks] == [[1], [2, 3], [3], [1, 4], []]
    assert sass.loops(blocks) == [sass.Loop(1, frozenset({1, 2, 3}))]


def test_a_jump_has_a_table():
    listing = """\
.text.some_kernel:
        /*0000*/   BRX R2 -0x10         (*"BRANCH_TARGETS .L_x_1,.L_x_2"*);
        /*0010*/   NOP ;
.L_x_1:
        /*0020*/   EXIT ;
.L_x_2:
        /*0030*/   BRA `(.L_x_1) ;
"""
    (blocks,) = sass.kernels(listing).values()
    assert [block.next for block in blocks] == [[2, 3], [2], [], [2]]


def test_an_instruction_knows_where_it_comes_from(blocks):
    largest, branch = blocks[1].instructions
    assert largest.within("larger") and largest.within("some_kernel") and not branch.within("larger")
    assert [place.line for place in largest.places] == [1, 5] and "adjust(x)" in branch.places[0].text
    assert machine_code.kind_of(largest) == "maximum and NaN" and machine_code.kind_of(branch) == machine_code.REST


def test_the_shortest_turn(blocks):
    (loop,) = sass.loops(blocks)

    def turn(*names: str) -> list[str]:
        through = [lambda block, name=name: any(i.name == name for i in block.instructions) for name in names]
        return [i.name for i in sass.shortest_turn(blocks, loop, through)]

    assert turn() == turn("FMNMX") == ["FMNMX", "BRA", "BRA"]
    assert turn("IADD3") == ["FMNMX", "BRA", "IADD3", "BRA"]
    assert turn("MUFU") == []


def test_the_shortest_run(blocks):
    def run(avoided: str) -> list[str]:
        return [i.name for i in sass.shortest_run(blocks, [], lambda block: block.instructions[0].name == avoided)]

    assert run("none") == run("IADD3") == ["MOV", "FMNMX", "BRA", "BRA", "EXIT"]
    assert run("FMNMX") == []


H100 = next(gpu for gpu in predicted_times.GPUS if gpu.name == "H100 SXM")
ONE = predicted_times.Launch(1, measuring=16, deciding=16, warps=12, resident=8, sharing=1)
WORK = predicted_times.Work(756, 756 * 2048, 256 * 1024, 260, cluster_barriers=3, block_barriers=3, additions=0)


def test_the_share_of_bandwidth_names_what_limits():
    few, many = (predicted_times.bandwidth_share(H100, n) for n in (200, 2000))
    assert few["bandwidth_share"] == 1 and many["bandwidth_share"] == pytest.approx(many["memory"] / many["issue"])
    assert few["memory"] == pytest.approx(2048 * 132 * 1.98e9 / 3.35e12)


def test_a_predicted_time_is_the_sum_of_its_parts():
    def seconds(batch: int = 1, launch=ONE, instructions: int = 300, **work: int) -> dict[str, float]:
        return predicted_times.step_seconds(H100, batch, launch, dataclasses.replace(WORK, **work), instructions)

    one = seconds()
    parts = ("launches", "measuring", "later", "latency", "barriers", "draw")
    assert one["total"] == pytest.approx(sum(one[part] for part in parts))
    # One cluster of 16 takes 64 bytes a cycle each at most, and its instructions take longer.
    assert one["memory"] == pytest.approx((756 * 2048 + 256 * 1024) / (16 * 64 * 1.98e9))
    assert one["measuring"] == pytest.approx(756 / 16 * 300 / 4 / 1.98e9)
    assert seconds(instructions=150)["measuring"] == pytest.approx(756 / 16 * 64 / 1.98e9)  # by exponentials
    assert seconds(launch=dataclasses.replace(ONE, warps=4))["measuring"] == pytest.approx(2 * one["measuring"])
    # A second wave waits once more; a large batch is bound by device memory.
    assert seconds(9)["latency"] == 2 * one["latency"] and seconds(8)["draw"] == one["draw"]
    large = seconds(64)
    assert large["measuring"] == pytest.approx(64 * 756 * 2048 / (0.9 * 3.35e12))
    assert seconds(64, later_bytes=1 << 24)["later"] == pytest.approx(64 * 2**24 / (0.9 * 3.35e12))
    assert seconds(8, later_bytes=1 << 24)["later"] == pytest.approx(2**27 / (2 * 0.9 * 3.35e12))  # from L2
    split = dataclasses.replace(ONE, launches=2, deciding=1)
    assert seconds(launch=split)["later"] > 10 * one["later"] and seconds(launch=split)["launches"] > one["launches"]
    assert seconds(additions=1 << 20)["later"] > one["later"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the fibers are not loaded")
def test_what_a_step_does_is_counted():
    """B = 1 on an H200: all rows stay, so that after them no more than the rejected draft's row is read."""
    gpu = next(gpu for gpu in predicted_times.GPUS if gpu.name == "H200 SXM")
    launch, grid = step_counts.launch_of(step_counts.CASES["latency"], gpu)
    assert (launch.launches, launch.measuring, launch.warps, launch.resident) == (1, 16, 12, 8)
    work, row = step_counts.work_of("latency", False, **grid), 2 * 128256
    assert (work.measured, work.measured_bytes) == (6 * 126, 6 * row)
    assert row <= work.later_bytes <= row + 32 * 2048 and 2 * 125 <= work.later <= 2 * 126 + 32
    assert 2 <= work.cluster_barriers <= 5 and work.block_barriers >= 1 and work.additions == 0


def test_the_prediction_of_a_histogram_is_in_microseconds():
    (predicted,) = machine_code.predicted_filter("sm_80", 1024).values()
    assert predicted["flat"] == pytest.approx(128_256 / 4 / 1.41e3) and predicted["peaked"] < predicted["flat"] / 30


@pytest.mark.nvcc
@pytest.mark.skipif(NVCC is None, reason="nvcc is not there")
@pytest.mark.parametrize("source", machine_code.SOURCES)
def test_the_measuring_loop_is_short(source):
    """Times need a GPU; instructions are exact without one."""
    kernels = machine_code.compiled(machine_code.report.ROOT / "csrc/cuda" / f"{source}.cu", "sm_90a")
    found = {k.name: machine_code.counted(k) for k in kernels if "measure" not in k.name}
    for fused in found.values():
        assert fused["stay"]["all"] <= 300
        assert fused["spilled_bytes"] == 0 and fused["atomic_loops"] == 0
        assert fused["stay"]["exponential and sum"] >= 4 * 32  # of one block
    step = found[f"{source}_kernel"]
    elsewhere = "in place" if source == "verify_tree" else "ring"
    assert step[elsewhere]["all"] <= 350 and 0 < step["histogram"] <= 1100
    if f"{source}_kernel" not in machine_code.RUNS:
        return
    barriers, fences = (3, 2) if source == "speculative_step" else (2, 1)
    assert 0 < step["cluster_barriers"] <= barriers and 0 < step["fences"] <= fences
