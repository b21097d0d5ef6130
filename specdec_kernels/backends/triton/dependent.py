"""Programmatic dependent launch: a kernel begins while the one before it still runs, and waits where it needs its
results.

A GPU has it from compute capability 9.0 on; elsewhere DEPENDENT is False, and launches follow one another. The first
kernel of an operation is launched without it, so that what comes before the operation has ended when its kernels begin.
What those read before they wait may therefore be inputs of the operation alone. Every program of every later kernel
waits, since a kernel that has ended says to the next one that all before it have.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_begin(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_earlier(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        gdc_wait()
