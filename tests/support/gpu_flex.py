"""Runs, without a GPU, the kernel that Inductor generates for FlexAttention on a GPU: Inductor is made to believe in a
small Hopper GPU, and the generated kernel runs in Triton's interpreter.

It is a separate program because torch caches what it learns about the machine. It prints a line of JSON for each case
of tests/models/test_attention_gpu.py: the distance of the result from the oracle's, and the constants of the kernel. It
replaces private names of torch and Triton, as they are in the versions that were tried.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import re
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import triton
from specdec.models.cache.tree import Tree
from specdec.models.forward import attention
from specdec.models.forward.attention import BLOCK, Queries, block_mask
from torch._inductor import config as inductor
from torch._inductor import graph
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._triton import has_triton
from triton.backends.compiler import GPUTarget

from .attending import Case, oracle, random_case

CUDA = torch.device("cuda", 0)
HOPPER = types.SimpleNamespace(
    name="H200", major=9, minor=0, multi_processor_count=8, total_memory=141 << 30, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20, gcnArchName="",
)  # fmt: skip


class _Driver:
    """Triton's driver of the same GPU."""

    utils = types.SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 232448, "warpSize": 32})

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_active_torch_device(self):
        return CUDA

    def get_device_interface(self):
        return torch.cuda


@contextlib.contextmanager
def _gpu() -> Iterator[None]:
    answers = {
        "torch.cuda.is_available": True, "torch.cuda.device_count": 1, "torch.cuda.current_device": 0,
        "torch.cuda.get_device_capability": (9, 0), "torch.cuda.get_device_properties": HOPPER,
        "torch.cuda._get_device_properties": HOPPER, "torch.cuda._lazy_init": None,
        "torch.cuda._exchange_device": 0, "torch.cuda._maybe_exchange_device": 0,
        "torch._subclasses.fake_tensor.init_gpu_context": None,
        "torch.cuda.get_rng_state": torch.zeros(16, dtype=torch.uint8), "torch.cuda.set_rng_state": None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, lambda *_, answer=answer, **__: answer, create=True))
        stack.enter_context(
            mock.patch("torch._higher_order_ops.flex_attention._permute_strides", lambda out, strides: out)
        )
        before = triton.runtime.driver._active
        triton.runtime.driver.set_active(_Driver())
        has_triton.cache_clear()  # an import (torchao's) may have asked before, when there was no GPU
        try:
            yield
        finally:
            triton.runtime.driver._active = before
            has_triton.cache_clear()


def captured_by(queries: Queries) -> tuple[torch.Tensor, ...]:
    return queries.positions, *(part for part in queries.tree or () if part is not None)


def written(case: Case) -> str:
    """The Python source with Triton kernels that Inductor generates for ``attend`` of such tensors on a GPU."""
    query, key, value, queries = case
    mask = block_mask(queries, key.shape[2])

    def rule(b, h, i, slot, positions, *tree):
        return attention.seen(Queries(positions, queries.window, Tree(*tree) if tree else None), b, i, slot)

    def traced(query, key, value, numbers, indices, *captured):
        unused = (
            len(torch_flex.BlockMask._TENSOR_ATTRS) - 2 + ("dq_kv_order_spt" in torch_flex.BlockMask._CONTEXT_ATTRS)
        )
        blocks = (*mask.seq_lengths, numbers, indices, *[None] * unused, BLOCK, BLOCK, rule)
        own = attention._kernel_options(query.shape[2] * query.shape[1] // key.shape[1])
        options = torch_flex._apply_kernel_options(query, key, value, False, own, None)
        scale = query.shape[-1] ** -0.5
        hop = torch_flex.flex_attention_hop
        return (hop(query, key, value, torch_flex._identity, blocks, scale, options, (), captured)[0],)

    def moved(value):
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)

    codes: list[str] = []
    with _gpu(), FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.inference_mode(False):
        tensors = (query, key, value, mask.kv_num_blocks, mask.kv_indices, *captured_by(queries))
        tensors = tuple(torch.empty(t.shape, dtype=t.dtype) for t in tensors)
        traced_graph = make_fx(traced, tracing_mode="fake", decomposition_table=select_decomp_table())(*tensors)
        traced_graph.graph.eliminate_dead_code()
        for module in traced_graph.modules():
            for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                meta = {k: v for k, v in node.meta.items() if k != "tensor_meta"}
                node.meta = {k: torch.utils._pytree.tree_map(moved, v) for k, v in meta.items()}
        tensors = tuple(map(moved, tensors))
    with (
        _gpu(),
        mock.patch.object(graph.GraphLowering, "save_output_code", staticmethod(codes.append)),
        inductor.patch(fx_graph_cache=False, compile_threads=1),
        torch._guards.tracing(torch._guards.TracingContext(mode)),
        contextlib.suppress(Exception),  # loading the generated code fails, and is not needed
    ):
        compile_fx_inner(traced_graph, list(tensors))
    assert codes, "nothing was written"
    return codes[0]


def interpreted(case: Case, folder: Path) -> tuple[torch.Tensor, dict[str, int]]:
    """(what the kernel computes, [B, H, q, D]; its constants). ``folder``: where its source is written."""
    found = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", written(case), re.S)
    ((name, source),) = [k for k in found if "forward_inner" in k[1]]
    source = re.sub(r"@triton_heuristics\.template\(.*?\n\)\n@triton\.jit", "@triton.jit", source, flags=re.S)
    source = source.replace("TILE_KV_MULTIPLE: tl.constexpr =", "TILE_KV_MULTIPLE =")  # a constant to the compiler only
    path = folder / "kernel.py"  # the interpreter reads it there
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("kernel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    constants = {n: int(v) for n, v in re.findall(r"\b([A-Z_]+) : tl\.constexpr = (\d+)\n", source)}

    query, key, value, queries = case
    mask, none = block_mask(queries, key.shape[2]), torch.empty(0)
    size, heads, q, width = query.shape
    lists = (mask.kv_num_blocks, mask.kv_indices, none, none, *(t.contiguous() for t in captured_by(queries)))
    tile, splits = constants["BLOCK_M"], constants.get("SPLIT_KV")
    if splits is None:  # one program for all keys of a head
        out = torch.full_like(query, math.nan)
        grid = (-(-q // tile), size, heads)
        getattr(module, name)[grid](query, key, value, none.new_empty(size, heads, q), none, *lists, out)
        return out, constants
    largest = torch.full((size, splits, heads, q), math.nan)
    total, sums = largest.clone(), torch.full((size, splits, heads, q, width), math.nan)
    grid = (-(-q * heads // key.shape[1] // tile), size * key.shape[1], splits)
    getattr(module, name)[grid](query, key, value, largest, total, *lists, sums)
    weights = torch.exp2(largest - largest.amax(1, keepdim=True))
    return (sums * weights[..., None]).sum(1) / (total * weights).sum(1)[..., None], constants


if __name__ == "__main__":
    from .attending import WIDER

    torch.set_num_threads(1)
    for name, (lengths, q, options) in WIDER.items():
        case = random_case(lengths, q, **options)
        with tempfile.TemporaryDirectory() as folder:
            got, constants = interpreted(case, Path(folder))
        wrong = (got.double() - oracle(*case)).abs().max().item()  # NaN, in JSON as well, if any of it is
        print(json.dumps({"name": name, "wrong": wrong, "constants": constants}), flush=True)
