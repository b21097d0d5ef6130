"""Prints the PTX of ``adjust`` in Triton, compiled without a GPU: ``python -m tests.support.adjusted_triton``. It is a
separate program because Triton is in interpreter mode in the tests' process."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec_kernels.backends.triton.core import adjust


@triton.jit
def adjusted_kernel(logits, bias, in_prompt, counts, penalties, out):
    at = tl.arange(0, 256)
    x, its_bias, prompt = tl.load(logits + at), tl.load(bias + at), tl.load(in_prompt + at)
    repetition, presence, frequency = tl.load(penalties), tl.load(penalties + 1), tl.load(penalties + 2)
    x = adjust(x, its_bias, prompt, tl.load(counts + at), repetition, presence, frequency)
    tl.store(out + at, x)


if __name__ == "__main__":
    types = {"in_prompt": "*u8", "counts": "*i32"}
    signature = {name: types.get(name, "*fp32") for name in adjusted_kernel.arg_names}
    print(triton.compile(ASTSource(adjusted_kernel, signature, {}), target=GPUTarget("cuda", 90, 32)).asm["ptx"])
