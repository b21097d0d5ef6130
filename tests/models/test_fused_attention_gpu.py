"""Whole models through the kernel that rotates, stores and attends, on a GPU: the logits and keys of their own
attention, bits that do not depend on how many tokens are fed to a layer, CUDA graphs, and texts."""

from __future__ import annotations

import copy

import pytest
import torch
from specdec import SpeculativeDecoder
from specdec.models.cache.tree import Tree
from specdec.models.exchanged.elementwise import NativeAngles
from specdec.models.forward.cached_model import CachedModel
from support.captured import on_gpu
from support.models import DECODER, prompts
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

pytestmark = on_gpu
SIZES = {**DECODER, "num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16, "initializer_range": 0.3}
MODELS = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 9},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
}


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def model_of(model_type: str, dtype: torch.dtype, seed: int = 0):
    torch.manual_seed(seed)
    with torch.inference_mode(False):
        config = CONFIG_MAPPING[model_type](**SIZES, **MODELS[model_type])
        return AutoModelForCausalLM.from_config(config).eval().to("cuda", dtype)


def fed(cached: CachedModel, tree: Tree | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The logits of a step after prompts of two lengths, and what is stored."""
    cache = cached.new_cache(2, 200)
    cached.prefill(cache, prompts(2, 30, 130))
    valid = torch.ones(2, 5, dtype=torch.bool, device="cuda")
    places = [cache.lengths[:, None] + torch.arange(5, device="cuda")] * 2
    if tree is not None:
        places = tree.places(cache.lengths, valid, cache.trash)
    tokens = torch.arange(10, device="cuda").view(2, 5)
    return cached(tokens, cache, cached.layout(*places, 199, tree)), cache.storage()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("of_tree", (False, True))
@pytest.mark.parametrize("model_type", MODELS)
def test_it_gives_the_logits_and_the_keys_of_the_model(model_type, of_tree, dtype):
    model = model_of(model_type, dtype)
    tree = Tree.of(torch.tensor([-1, -1, 0, 2], device="cuda")) if of_tree else None
    cached = CachedModel(model)
    assert cached.attention.name == "fused" and cached.reads_only_filled
    (logits, stored), (own, its_stored) = fed(cached, tree), fed(CachedModel(model, attention="model"), tree)
    allowed = torch.finfo(dtype).eps ** 0.5
    assert (logits - own).abs().max() <= allowed * own.abs().max()
    for a, b in zip(stored, its_stored, strict=True):
        assert (a - b)[:, :, :-1].abs().max() <= allowed * b.abs().max()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_angles_are_those_of_the_model(dtype):
    """In one launch, with the same bits."""
    model = model_of("llama", dtype)
    angles = CachedModel(model).steps.model.rotary_emb
    assert isinstance(angles, NativeAngles) and not isinstance(model.model.rotary_emb, NativeAngles)
    positions = torch.tensor([[0, 1, 17, 100], [3, 2047, 131071, 5]], device="cuda")
    x = torch.zeros(1, dtype=dtype, device="cuda")
    for own, theirs in zip(angles(x, positions), model.model.rotary_emb(x, positions), strict=True):
        assert own.dtype == dtype and torch.equal(own, theirs)


def test_errors_of_half_precision():
    """Against float32, no larger than those of transformers' own attention."""
    model = model_of("llama", torch.bfloat16)
    exact, _ = fed(CachedModel(copy.deepcopy(model).float(), attention="model"))
    errors = [(fed(CachedModel(model, attention=name))[0] - exact).abs().mean() for name in ("fused", "model")]
    assert 0 < errors[0] <= 1.1 * errors[1]


def test_a_graph_serves_all_lengths_and_nothing_waits():
    cached = CachedModel(model_of("llama", torch.bfloat16))
    cache = cached.new_cache(2, 200)
    tokens, places = (
        torch.zeros(2, 5, dtype=torch.int64, device="cuda"),
        torch.zeros(2, 5, dtype=torch.int64, device="cuda"),
    )

    def step() -> torch.Tensor:
        return cached(tokens, cache, cached.layout(places, places, 199))

    def refill(first: int, second: int) -> None:
        cached.prefill(cache, [prompts(1, n, n, seed=n)[0] for n in (first, second)])
        places.copy_(cache.lengths[:, None] + torch.arange(5, device="cuda"))
        tokens.copy_(torch.arange(10, device="cuda").view(2, 5) + first)

    refill(3, 150)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ((60, 129), (190, 1), (3, 150)):
        refill(*lengths)
        graph.replay()
        replayed = out.clone()
        refill(*lengths)
        assert torch.equal(replayed, step())


@pytest.mark.parametrize("num_drafts", (0, 4))
def test_greedy_texts_are_those_of_flex_attention(num_drafts, monkeypatch):
    target, draft = model_of("llama", torch.float32), model_of("llama", torch.float32, seed=1)

    def text() -> list:
        decoder = SpeculativeDecoder(target, draft, num_drafts)
        return decoder.generate(prompts(3, 5, 60), max_new_tokens=24, eos_token_id=[]).tokens

    fused = text()
    monkeypatch.setattr("specdec.models.forward.cached_model.choose", lambda model, requested: "flex")
    assert text() == fused
