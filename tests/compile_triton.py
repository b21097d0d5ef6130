"""Compiles every Triton kernel ahead of time for one target, without a GPU: ``compile_triton.py cuda 90 32``.

A program of its own, because the tests' process has Triton in interpreter mode. Prints a line for each kernel.
"""

from __future__ import annotations

import sys
import time

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec_kernels.backends.triton.draft_step import draft_draw_kernel, draft_stats_kernel
from specdec_kernels.backends.triton.speculative_step import draw_kernel, residual_kernel, row_stats_kernel

POINTERS = {
    "draft_tokens_ptr": "*i64", "tokens_ptr": "*i64", "walk_ptr": "*i64", "num_drafts_ptr": "*i64", "seed_ptr": "*i64",
    "position_ptr": "*i64", "num_accepted_ptr": "*i32", "status_ptr": "*i32",
}  # fmt: skip


def compile_kernel(kernel, target: GPUTarget, logits: str, absent: tuple[str, ...], **constants: int) -> None:
    constants |= dict.fromkeys(absent)
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("logits_ptr", "target_ptr", "draft_ptr"):
            signature[name] = logits
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, "*fp32")
        else:
            signature[name] = "i64" if "stride" in name else "i32"
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    start = time.perf_counter()
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=target)
    binary = compiled.asm["cubin" if target.backend == "cuda" else "hsaco"]
    spills = getattr(compiled, "n_spills", None)
    seconds = time.perf_counter() - start
    print(f"{kernel.__name__} {logits} without {absent}: {len(binary)} bytes, spills {spills}, {seconds:.1f} s")
    assert len(binary) > 0


if __name__ == "__main__":
    backend, arch, warp_size = sys.argv[1:]
    target = GPUTarget(backend, int(arch) if backend == "cuda" else arch, int(warp_size))
    for logits in ("*fp32", "*bf16", "*fp16"):
        compile_kernel(draft_stats_kernel, target, logits, ())
        compile_kernel(draft_draw_kernel, target, logits, (), BLOCKS=128)
    for absent in ((), ("draft_lse_ptr", "num_drafts_ptr"), ("draft_ptr", "draft_lse_ptr")):
        compile_kernel(row_stats_kernel, target, "*bf16", absent)
        compile_kernel(residual_kernel, target, "*bf16", absent, BLOCKS=128)
        compile_kernel(draw_kernel, target, "*bf16", absent, BLOCKS=128, ROWS=8)
