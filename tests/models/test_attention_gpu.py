"""Compiled flex attention on a GPU: right, in CUDA graphs whose lengths change, and without a wait. Without a GPU, the
kernels that Inductor would load there run in Triton's interpreter."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from specdec.models.cache.tree import Tree
from specdec.models.forward.attention import BLOCK, Queries, attend, block_mask
from specdec.models.forward.cached_model import CachedModel
from support import ROOT
from support.attending import WIDER, Case, oracle, random_case
from support.models import DECODER, prompts
from transformers import LlamaConfig, LlamaForCausalLM

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def on_device(case: Case) -> Case:
    positions, window, tree = case.queries.positions.cuda(), case.queries.window, case.queries.tree
    tree = None if tree is None else Tree(*(None if t is None else t.cuda() for t in tree))
    return Case(*(t.cuda() for t in case[:3]), Queries(positions, window, tree))


def by_flex(case: Case, **scores) -> torch.Tensor:
    return attend(*case[:3], block_mask(case.queries, case.key.shape[2]), **scores)


def assert_right(got: torch.Tensor, case: Case, **scores) -> None:
    """In 16 bits, weights and values are rounded before they are multiplied."""
    allowed = 1e-5 if got.dtype == torch.float32 else 4 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.cpu().double(), oracle(*case, **scores), atol=allowed, rtol=allowed)


@on_gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("name", WIDER)
def test_compiled(name, dtype):
    """Slots that no query sees hold large numbers, and those that are not read NaN."""
    lengths, q, options = WIDER[name]
    case = random_case(lengths, q, dtype=dtype, poison=1e4, **options)
    assert_right(by_flex(on_device(case)), case)
    assert_right(by_flex(on_device(case), scale=0.2, softcap=2.0), case, scale=0.2, softcap=2.0)


def refill(case: Case, other: Case) -> None:
    """The values of ``other`` in the tensors of ``case``."""
    for mine, its in zip(case[:3], other[:3], strict=True):
        mine.copy_(its)
    case.queries.positions.copy_(other.queries.positions)


@on_gpu
@pytest.mark.parametrize(
    "options", ({}, {"window": 9, "padding": 1}, {"parents": (-1, -1, 0, 1)}), ids=("plain", "window", "tree")
)
def test_a_graph_serves_all_lengths(options):
    """Lengths from 0 to the last slot, changed between replays of one graph; and no second compilation."""
    lengths = ((3, 700), (990, -1), (0, 127), (128, 512))
    cases = [random_case(n, 5, seed=i, capacity=1000, **options) for i, n in enumerate(lengths)]
    buffers = on_device(cases[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            by_flex(buffers)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch._dynamo.config.patch(error_on_recompile=True), torch.cuda.graph(graph):
        out = by_flex(buffers)
    for case in (*cases[1:], cases[0], cases[1]):
        refill(buffers, case)
        out.fill_(math.nan)
        graph.replay()
        assert_right(out, case)


@on_gpu
def test_nothing_waits():
    case = on_device(random_case((3, 700), 5, capacity=1000, window=9, padding=1))
    by_flex(case)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        by_flex(case)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_model_takes_it(dtype):
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16, "initializer_range": 0.3}
    model = LlamaForCausalLM(LlamaConfig(**{**DECODER, **sizes})).eval().to("cuda", dtype)
    cached, own = CachedModel(model), CachedModel(model, attention="model")
    assert cached.reads_only_filled and not own.reads_only_filled
    logits = []
    for each in (cached, own):
        cache = each.new_cache(2, 200)
        each.prefill(cache, prompts(2, 30, 130))
        places = cache.lengths[:, None] + torch.arange(5, device="cuda")
        layout = each.layout(places, places, 200)
        logits.append(each(torch.arange(10, device="cuda").view(2, 5), cache, layout))
    allowed = torch.finfo(dtype).eps ** 0.5 * logits[1].abs().max()
    assert (logits[0] - logits[1]).abs().max() <= allowed


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="its kernels run there")
def test_the_kernels_of_a_gpu():
    """What they must not read is NaN here, too."""
    command, environment = [sys.executable, "-m", "tests.support.gpu_flex"], os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    cases = {case["name"]: case for case in map(json.loads, done.stdout.splitlines())}
    assert cases.keys() == WIDER.keys()
    for name, (_, q, options) in WIDER.items():
        group, constants = options.get("group", 2), cases[name]["constants"]
        assert cases[name]["wrong"] < 3e-6, name
        assert ("SPLIT_KV" in constants) == (group != 3)  # Inductor's decoding kernel takes groups of a power of two
        assert constants["BLOCK_M"] >= min(q * group, BLOCK) and BLOCK % constants["BLOCK_M"] == 0
