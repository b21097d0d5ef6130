"""Compiles every Triton kernel ahead of time for one target, without a GPU:
``python -m tests.support.compile_triton cuda 90 32 all``. With ``few`` in place of ``all``, it compiles every kernel at
least once, in the variants with the most options only.

It is a separate program because Triton is in interpreter mode in the tests' process. It runs the operations on CPU
tensors and compiles each kernel where it would be launched, so it sees the arguments and variants that a GPU would get.
It prints a line for each variant: its registers, and the bytes that a thread spills, or "unknown".
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tempfile
import time

import torch
import triton
from specdec.models.cache import compaction
from specdec_layers import DeltaState, SsdState
from specdec_layers.backends.triton import attend as attend_module
from specdec_layers.backends.triton import elementwise as elementwise_module
from specdec_layers.backends.triton import launch
from specdec_layers.backends.triton import recurrent as recurrent_module
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend

from specdec_kernels.backends.triton import draft_children as children_module
from specdec_kernels.backends.triton import draft_step as draft_module
from specdec_kernels.backends.triton import speculative_step as step_module
from specdec_kernels.backends.triton import stages, tables
from specdec_kernels.backends.triton import verify_tree as tree_module
from specdec_kernels.ops import RULES, TREE_RULES
from specdec_kernels.testing import StepInputs, TreeInputs, random_step, random_tree_step

POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8",
}  # fmt: skip


def described(value: object, path: tuple[int, ...], constants: dict, aligned: list, specialise: bool) -> object:
    """The type of an argument in a launch: None and 1 are constants, tuples are taken apart, and multiples of 16 are
    marked as such."""
    if isinstance(value, tuple):
        parts = [described(v, (*path, i), constants, aligned, specialise) for i, v in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if value is None or (specialise and isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    number = value.data_ptr() if isinstance(value, torch.Tensor) else value
    if specialise and number % 16 == 0:
        aligned.append(path)
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "i32" if -(2**31) <= value < 2**31 else "i64"


class Compiled:
    """Replaces a kernel, and compiles each variant once instead of launching it."""

    variants: set[str] = set()

    def __init__(self, kernel: triton.JITFunction, target: GPUTarget):
        self.kernel, self.target, self.__name__ = kernel, target, kernel.__name__

    def __getitem__(self, grid: tuple[int, ...]):
        return self.compile

    def compile(
        self, *arguments, num_warps: int, maxnreg: int | None = None, enable_fp_fusion: bool = True,
        launch_pdl: bool = False, **constants,
    ) -> None:  # fmt: skip
        signature, paths, aligned = {}, {}, []
        for i, param in enumerate(self.kernel.params):
            if param.name in constants:
                signature[param.name], paths[i,] = "constexpr", constants[param.name]
            else:
                signature[param.name] = described(arguments[i], (i,), paths, aligned, not param.do_not_specialize)
        variant = f"{self.kernel.__name__} {signature} {paths} {aligned} {num_warps}"
        if variant in self.variants:
            return
        self.variants.add(variant)
        start = time.perf_counter()
        multiple = make_backend(self.target).parse_attr("D")
        source = ASTSource(self.kernel, signature, paths, {path: multiple for path in aligned})
        options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
        options |= {} if maxnreg is None else {"maxnreg": maxnreg}
        options |= {"launch_pdl": True} if launch_pdl else {}
        compiled = triton.compile(source, target=self.target, options=options)
        binary = compiled.asm["cubin" if self.target.backend == "cuda" else "hsaco"]
        registers, spilled = resources(compiled)
        print(
            f"{self.kernel.__name__} {constants}, {num_warps} warps: {registers} registers, {spilled} bytes spilled,",
            f"{instructions(compiled)} instructions, {len(binary)} bytes, {time.perf_counter() - start:.1f} s",
            flush=True,
        )  # fmt: skip
        assert len(binary) > 0


def resources(compiled: CompiledKernel) -> tuple[str, str]:
    """(registers of a thread, bytes that it spills). Triton itself would ask a driver for them. On AMD's GPUs, scalar
    registers are spilled to lanes of a vector register, which costs no memory."""
    if (text := compiled.asm.get("amdgcn")) is not None:
        registers, spilled = (re.search(rf"\.{n}: *(\d+)", text)[1] for n in ("vgpr_count", "vgpr_spill_count"))
        return registers, str(4 * int(spilled))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        try:
            command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, RuntimeError, subprocess.CalledProcessError):  # not every build of Triton has these tools
            return "unknown", "unknown"
    return tuple(re.search(rf"{name}:(\d+)", usage)[1] for name in ("REG", "STACK"))


def instructions(compiled: CompiledKernel) -> str:
    """How many instructions there are up to the last exit, on NVIDIA's GPUs."""
    if "cubin" not in compiled.asm:
        return "unknown"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        try:
            command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, RuntimeError, subprocess.CalledProcessError):
            return "unknown"
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", text, re.MULTILINE)
    return str(max((i for i, line in enumerate(lines) if "EXIT" in line), default=0) + 1)


def compile_compaction(target: GPUTarget) -> None:
    compaction.compact_kernel = Compiled(compaction.compact_kernel, target)
    for dtype in (torch.float32, torch.bfloat16):
        states = [torch.zeros(2, 8, 40, 64, dtype=dtype)]
        compaction.Compaction(states)(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64))
    states = [torch.zeros(2, 3, 40, 7, dtype=torch.bfloat16)]
    compaction.Compaction(states)(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64))


def compile_recurrent(few: bool) -> None:
    """With the sizes of Qwen3.5-27B, Kimi-Linear, Nemotron-3-Nano and Jamba-mini."""
    start, valid = torch.zeros(2, dtype=torch.int64), torch.ones(2, 4, dtype=torch.bool)

    def bf16(*shape: int) -> torch.Tensor:
        return torch.zeros(2, 4, *shape, dtype=torch.bfloat16)

    window, bias = torch.zeros(2, 12, 10240, dtype=torch.bfloat16), torch.zeros(10240)
    parents = torch.tensor([[-1, 0, 0, 1]] * 2)
    for of_tree, keep in ((None, False), (parents, False)) if few else ((None, False), (None, True), (parents, False)):
        for key_heads, heads, decays in ((16, 48, ()), (32, 32, (128,)))[: 1 if few else 2]:
            q, v, g, beta = bf16(key_heads, 128), bf16(heads, 128), torch.zeros(2, 4, heads, *decays), bf16(heads)
            state = DeltaState.empty(2, 9, q, v, g, beta)
            recurrent_module.delta_step(*state, q, q, v, g, beta, start, start, valid, of_tree, 0, keep, True)
        for heads, size, groups, numbers in ((64, 64, 8, 128), (8192, 1, 1, 16))[: 1 if few else 2]:
            x, dt, B = bf16(heads, size), torch.zeros(2, 4, heads), bf16(groups, numbers)
            A = torch.zeros(heads) if size > 1 else torch.zeros(heads, numbers)
            state = SsdState.empty(2, 9, x, dt, B)
            D = A if size > 1 else None
            recurrent_module.ssd_step(*state, x, dt, B, B, A, D, start, start, valid, of_tree, 0, keep)
    for silu, of_tree in ((True, None), (True, parents)) if few else ((True, None), (False, None), (True, parents)):
        weight, its_bias = torch.zeros(10240, 4 if silu else 3), bias if silu else None
        recurrent_module.conv_window(window, bf16(10240), weight, its_bias, silu, start, valid, of_tree, 0)


def compile_elementwise(few: bool) -> None:
    """With the sizes of Llama-3.1-8B and Gemma-2-9B."""
    for dtype in (torch.bfloat16,) if few else (torch.bfloat16, torch.float16, torch.float32):
        x, weight = torch.zeros(2, 4, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
        for offset, first in ((0.0, True), (1.0, False)):
            elementwise_module.rms_norm(x, weight, 1e-5, offset, first)
            for own in (None, weight) if offset else (None,):
                elementwise_module.add_rms_norm(x, x, weight, 1e-5, offset, first, own, 1e-6)
        elementwise_module.rms_norm(x[..., :3584], None, 1e-6, 0.0, False)
        angles = torch.zeros(2, 4, 128, dtype=dtype)
        elementwise_module.rotate(x.view(2, 4, 32, 128).transpose(1, 2), angles, angles)
        elementwise_module.rope_angles(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(64), 1.0, dtype)
        elementwise_module.gated(x, x, False)
        elementwise_module.gated(x, x, True)


def compile_attend(few: bool) -> None:
    """With the sizes of Llama-3.1-8B and -3.2-1B, Gemma 2 and 3, gpt-oss, GLM-4.5 and Qwen3-Next."""
    slots, tree = torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, 9, dtype=torch.int64)

    def attend(heads: int, key_heads: int, size: int, dtype: torch.dtype, seen: torch.Tensor, **more) -> None:
        q, k = torch.zeros(2, 8, heads, size, dtype=dtype), torch.zeros(2, 8, key_heads, size, dtype=dtype)
        keys = torch.zeros(2, key_heads, 1024, size, dtype=dtype)
        angles = [torch.zeros(2, 8, more.get("angles", size), dtype=dtype)] * 2
        sinks = torch.zeros(heads, dtype=dtype) if "angles" in more else None
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        stored = (None, None) if more.get("stored") else (k, k)
        others = (*angles, sinks, None, size**-0.5, more.get("cap", 0.0))
        attend_module.store_and_attend(q, *stored, keys, keys, slots, seen, *others)

    for dtype in (torch.bfloat16,) if few else (torch.bfloat16, torch.float16, torch.float32):
        attend(32, 8, 128, dtype, tree[..., :2])
        attend(32, 8, 128, dtype, tree)
        attend(64, 8, 64, dtype, tree[..., :2], angles=32)
        attend(16, 8, 256, dtype, tree[..., :2], cap=50.0)
        if not few and dtype == torch.bfloat16:
            attend(32, 8, 64, dtype, tree[..., :2])
            attend(96, 8, 128, dtype, tree[..., :2])
            attend(16, 2, 256, dtype, tree)
            attend(8, 1, 512, dtype, tree[..., :2])
            attend(8, 4, 256, dtype, tree[..., :2], stored=True)


def compile_variants(target: GPUTarget, few: bool) -> None:
    compile_compaction(target)
    modules = (stages, draft_module, step_module, children_module, tree_module, recurrent_module, elementwise_module)
    modules += (attend_module,)
    for module in modules:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, Compiled(getattr(module, name), target))

    def draft(inputs: StepInputs, logits: torch.Tensor) -> None:
        rest = (inputs.allowed_to_draft(2), inputs.seed, inputs.position, 2, RULES.index(inputs.rule))
        draft_module.draft_step(logits, inputs.sampling(), inputs.draft_tokens[:, :2], inputs.d2t, *rest)

    def verify(inputs: StepInputs) -> StepInputs:
        step_module.speculative_step(*inputs.operands())
        return inputs

    def tree(inputs: TreeInputs, rules: tuple[str, ...]) -> None:
        for rule in rules:
            its_inputs = inputs.replace(rule=rule, draft_logits=None if rule == "walk" else inputs.draft_logits)
            tree_module.verify_tree(*its_inputs.operands())
        children(inputs, sampled=False)
        children(inputs, sampled=True)

    def children(inputs: TreeInputs, sampled: bool) -> None:
        rest = (inputs.node_tokens[:, :1], inputs.d2t, inputs.seed, inputs.position, inputs.seed, 3, sampled)
        children_module.draft_children(inputs.draft_logits[:, 1], inputs.sampling(), *rest)

    compile_recurrent(few)
    compile_elementwise(few)
    compile_attend(few)
    # As many blocks as fill a large GPU.
    large = functools.partial(random_step, 32, 8, 128_256, kind="one_hot")
    verify(large(dtype=torch.bfloat16))
    step = functools.partial(random_step, 2, 3, 128_256, dtype=torch.bfloat16)
    fork = functools.partial(
        random_tree_step, (-1, -1, 0, 1, 2, 2), 2, 128_256, rule="token", dtype=torch.bfloat16, drafter="cpu"
    )
    filters, penalties = {"top_k": 50, "top_p": 0.9, "min_p": 0.1}, {"table": 9, "repetition_penalty": 1.1}
    # Of its own arguments none is left out, as a batch's with drafts of different lengths.
    every_pointer = step(stats=True).replace(num_drafts=torch.tensor([1, 3]))
    if few:
        coupled = step(rule="coupled", allowed=0.5, **filters, **penalties).replace(masked_drafts=3)
        block = coupled.replace(rule="block")
        draft(coupled, coupled.target_logits[:, 0])
        draft(block, coupled.target_logits[:, 0])
        verify(block)
        verify(coupled)
        tree(fork(), rules=("block",))
        verify(every_pointer)
        return
    verify(large(dtype=torch.bfloat16, **filters))
    verify(large(dtype=torch.float32, log_probs=True, **filters))
    full = verify(step(draft_dtype=torch.float16, stats=True))
    verify(every_pointer)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        draft(full, full.target_logits[:, 0].to(dtype))
    draft(step(**filters), full.target_logits[:, 0])
    reduced = step(reduced=5000, **penalties, log_probs=True)
    draft(reduced.replace(rule="coupled"), reduced.draft_logits[:, 0])
    verify(reduced)
    verify(step(kind="one_hot", rule="block").replace(num_drafts=torch.tensor([1, 3])))
    verify(step(rule="block", **filters))
    verify(step(rule="coupled", log_probs=True))
    verify(step(allowed=0.5, masked_drafts=3, **filters))
    masked = verify(step(reduced=5000, allowed=0.5, masked_drafts=3, log_probs=True, **filters, **penalties))
    draft(masked, masked.draft_logits[:, 0])
    # Sizes and strides of 1 are constants of the kernel.
    verify(random_step(1, 1, 1, table=1))
    tree(fork(), TREE_RULES)
    tree(fork(reduced=5000, **filters, **penalties).replace(num_nodes=torch.tensor([6, 2])), TREE_RULES)
    tree(random_tree_step((-1,) * 300, 1, 128_256, rule="token", drafter="cpu"), ("walk", "block"))
    tree(random_tree_step((-1,), 1, 1, rule="token", drafter="cpu", table=1), ("token",))
    verify_root = random_tree_step((), 1, 1, rule="token").replace(draft_logits=torch.zeros(1, 1, 1))
    tree_module.verify_tree(*verify_root.operands())


if __name__ == "__main__":
    backend, arch, warp_size, variants = sys.argv[1:]
    families = {"80": "ampere", "90": "hopper", "100": "blackwell"}
    tables.family = lambda device: families.get(arch, "amd")
    launch.family = lambda device: "nvidia" if arch in families else "amd"
    target = GPUTarget(backend, int(arch) if backend == "cuda" else arch, int(warp_size))
    compile_variants(target, {"few": True, "all": False}[variants])
