"""The machine code of the CUDA kernels of recurrent layers: nothing is spilled, and a token takes few instructions."""

from __future__ import annotations

import re

import predict_recurrent
import pytest
from support import sass
from support.machine_code import Kernel, compiled
from support.ptxas import NVCC

pytestmark = [pytest.mark.nvcc, pytest.mark.skipif(NVCC is None, reason="nvcc is not there")]
# What the turn for a token goes through: the exponential of its decay, sums over lanes, and products with a state.
THROUGH = (r"MUFU\.EX2", r"SHFL", r"FFMA")


def token_turn(kernel: Kernel) -> list[sass.Instruction]:
    """The instructions that take one token into a warp's tile; [] if the kernel has no such loop."""

    def has(pattern: str):
        return lambda block: any(re.match(pattern, i.opcode) for i in block.instructions)

    through = [has(pattern) for pattern in THROUGH]
    turns = (sass.shortest_turn(kernel.blocks, loop, through) for loop in sass.loops(kernel.blocks))
    return next((turn for turn in turns if turn), [])


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_nothing_is_spilled(architecture, tmp_path):
    kernels = compiled("recurrent", architecture, tmp_path)
    assert len(kernels) == 9 and not any(kernel.spilled for kernel in kernels)
    large = {"delta_step_kernel<16>", "ssd_step_kernel<32, 2>"}
    assert all(0 < kernel.registers <= (255 if kernel.name in large else 128) for kernel in kernels)


def test_instructions_of_a_token(tmp_path):
    """Those that the prediction counts with, or fewer; most of them are not there for addresses."""
    kernels = {kernel.name: kernel for kernel in compiled("recurrent", "sm_90a", tmp_path)}
    for name, most in predict_recurrent.INSTRUCTIONS.items():
        turn = token_turn(kernels[name])
        assert 0.9 * most <= len(turn) <= most, (name, len(turn))
        assert not any(i.name in ("LDL", "STL") for i in turn)
