"""Forwards through torch.compile: how many graphs, the same logits, the same texts, and errors instead of fallbacks.

dynamo is what can break here, so these tests run its graphs as they are; inductor has a nightly one."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partialmethod

import pytest
import torch
from specdec import EarlyExitDrafter, SpeculativeDecoder, load_embedded_pair
from specdec.models.cache.kv_cache import visible_slots
from specdec.models.forward import compiled as compiled_module
from specdec.models.forward.cached_model import CachedModel
from specdec.models.forward.compiled import CompiledForward
from support.models import DECODER, POSITIONS, prompts, tiny_model
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM


class Graphs:
    """A backend that keeps graphs and runs them: as they are, or as AOTAutograd makes them for inductor, with guards of
    its own."""

    def __init__(self):
        self.graphs: list[torch.fx.GraphModule] = []
        self.traced_again = False

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        self.graphs.append(graph)
        return aot_autograd(fw_compiler=lambda traced, _: traced)(graph, inputs) if self.traced_again else graph


@pytest.fixture(autouse=True)
def _fresh_dynamo(monkeypatch):
    monkeypatch.setattr("specdec.models.supported.COMPILED_ON", ("cpu",))

    def reset():
        torch._dynamo.reset()
        compiled_module._COPIES.clear()

    reset()
    counters.clear()
    yield
    reset()


@pytest.fixture
def uncompiled_graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Of every compiled model."""
    backend = Graphs()
    monkeypatch.setattr(CompiledForward, "__init__", partialmethod(CompiledForward.__init__, backend=backend))
    return backend


def assert_same_logits(compiled: CachedModel, batch: int, capacity: int, widths: tuple[int, ...], step: int) -> None:
    """Feeds tokens at lengths from 20 to the last slot but the trash, where attention sees all that it ever does."""
    with torch.inference_mode():
        plain = CachedModel(compiled.model, attention="model")
        caches = [compiled.new_cache(batch, capacity), plain.new_cache(batch, capacity)]
        for cache in caches:
            plain.prefill(cache, prompts(batch, 20, 20))
        for width in widths:
            for first in [*range(20, capacity - 1 - width, step), capacity - 1 - width]:
                places = torch.arange(first, first + width).expand(batch, width)
                tokens = torch.tensor(prompts(batch, width, width, seed=first))
                layout = plain.layout(places, places, visible_slots(first + width, capacity))
                ours, theirs = (m(tokens, c, layout) for m, c in zip((compiled, plain), caches, strict=True))
                torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
        for ours, theirs in zip(*(cache.storage() for cache in caches), strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_one_graph_serves_all_lengths_batches_and_caches(uncompiled_graphs):
    """2 sequences are also 2 heads of keys, and 4 are 4 heads: sizes that dynamo must not take for one."""
    compiled = CachedModel(tiny_model(layers=1)).compiled()
    for batch, capacity, widths in ((2, 140, (2, 5)), (4, POSITIONS, (5, 8)), (3, 64, (3,))):
        assert_same_logits(compiled, batch, capacity, widths, step=60)
    assert len(uncompiled_graphs.graphs) == 1
    assert not counters["graph_break"]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ("llama", "qwen3", "gpt2", "gemma3", "bloom"))
def test_every_kind_of_model_in_four_graphs(kind, uncompiled_graphs):
    uncompiled_graphs.traced_again = True
    compiled = CachedModel(tiny_model(kind)).compiled()
    for batch, capacity in ((2, 140), (4, 200), (1, 100), (1, 200)):
        assert_same_logits(compiled, batch, capacity, widths=(1, 2, 5), step=30)
    assert len(uncompiled_graphs.graphs) == 4


@pytest.mark.nightly
def test_texts_are_the_same(uncompiled_graphs):
    """Also where prompts of one token leave the cache empty, and with drafts in the target's own cache. Graphs that run
    as they are compute the same bits."""
    target = tiny_model()
    for draft in (tiny_model(layers=1), EarlyExitDrafter(target, 1)):
        decoders = [SpeculativeDecoder(target, draft, num_drafts=3, compile=how) for how in (False, True)]
        graphs = 0
        for texts in ([[5], [7]], prompts(3, 2, 9), prompts(2, 30, 40)):
            plain, compiled = (d.generate(texts, max_new_tokens=70, eos_token_id=[]) for d in decoders)
            assert compiled.tokens == plain.tokens
            assert compiled.drafter_error is None
            graphs = graphs or len(uncompiled_graphs.graphs)
        assert len(uncompiled_graphs.graphs) == graphs
        uncompiled_graphs.graphs.clear()


@pytest.mark.nightly
def test_the_callers_objects_stay_as_they_are(uncompiled_graphs):
    """Neither a forward nor weights are replaced: what the caller changes in place acts."""
    model = copy.deepcopy(tiny_model())
    before = dict(vars(model))
    drafter = EarlyExitDrafter(model, 1)
    of_drafter = drafter.model
    decoder = SpeculativeDecoder(model, drafter, num_drafts=2, compile=True)
    first = decoder.generate([[1, 2, 3]], max_new_tokens=8, eos_token_id=[], output_logits=True)
    assert vars(model) == before and drafter.model is of_drafter
    with torch.no_grad():
        model.lm_head.weight.neg_()
    second = decoder.generate([[1, 2, 3]], max_new_tokens=8, eos_token_id=[], output_logits=True)
    torch.testing.assert_close(second.logits[0][0], -first.logits[0][0])


def test_decoders_of_a_model_share_its_graphs(uncompiled_graphs):
    model = copy.deepcopy(tiny_model(layers=1))
    first, second = (CachedModel(model, compile=True) for _ in range(2))
    assert_same_logits(first, batch=2, capacity=64, widths=(3,), step=60)
    assert len(uncompiled_graphs.graphs) == 1
    assert_same_logits(second, batch=2, capacity=64, widths=(3,), step=60)
    assert len(uncompiled_graphs.graphs) == 1
    assert_same_logits(CachedModel(copy.deepcopy(model), compile=True), batch=2, capacity=64, widths=(3,), step=60)
    assert len(uncompiled_graphs.graphs) == 2


def test_other_modules_are_compiled_again(uncompiled_graphs):
    model = copy.deepcopy(tiny_model(layers=1))
    compiled = CachedModel(model, compile=True)
    assert_same_logits(compiled, batch=2, capacity=64, widths=(3,), step=60)
    model.lm_head = copy.deepcopy(model.lm_head)
    model.lm_head.weight.data.neg_()
    assert_same_logits(compiled, batch=2, capacity=64, widths=(3,), step=60)
    assert len(uncompiled_graphs.graphs) == 2


@pytest.mark.parametrize(("kind", "dtype"), (("llama", torch.float32), ("bloom", torch.float64)))
def test_graphs_go_with_their_model(kind, dtype, uncompiled_graphs):
    """Bloom keeps its attention, and a float64 model torch's linear layers, so nothing in it is replaced."""
    model = copy.deepcopy(tiny_model(kind, layers=1)).to(dtype)
    left = weakref.ref(model)
    with torch.inference_mode():
        compiled = CachedModel(model, compile=True)
        cache = compiled.new_cache(1, 64)
        places = torch.arange(3)[None]
        compiled(places, cache, compiled.layout(places, places, 64))
    assert len(uncompiled_graphs.graphs) == 1 and len(compiled_module._COPIES) == 1
    del model, compiled, cache
    torch._dynamo.reset()  # whose guards have references of their own
    uncompiled_graphs.graphs.clear()
    gc.collect()
    assert left() is None and not compiled_module._COPIES


class Breaking(LlamaForCausalLM):
    def forward(self, input_ids, position_ids=None, **kwargs):
        torch._dynamo.graph_break()
        return super().forward(input_ids, position_ids=position_ids, **kwargs)


@pytest.fixture(scope="module")
def breaking() -> Breaking:
    torch.manual_seed(0)
    return Breaking(LlamaConfig(num_hidden_layers=1, **DECODER)).eval()


@pytest.mark.parametrize("role", (pytest.param("target", marks=pytest.mark.nightly), "draft"))
def test_what_cannot_be_one_graph_is_refused(role, breaking, uncompiled_graphs):
    """A draft, too: it is not dropped as one that fails would be."""
    pair = {"target": tiny_model(layers=1), "draft": tiny_model(layers=1)} | {role: breaking}
    decoder = SpeculativeDecoder(pair["target"], pair["draft"], num_drafts=2, compile=True)
    with pytest.raises(ValueError, match=r"compile: got True for model type 'llama'.*\(Unsupported: .*graph_break"):
        decoder.generate([[1, 2, 3]], max_new_tokens=8)
    plain = SpeculativeDecoder(pair["target"], pair["draft"], num_drafts=2)
    assert len(plain.generate([[1, 2, 3]], max_new_tokens=8, eos_token_id=[]).tokens[0]) == 8


@pytest.mark.nightly
@torch._dynamo.config.patch(recompile_limit=1)
def test_more_graphs_than_dynamo_keeps_are_refused(uncompiled_graphs):
    compiled = CachedModel(tiny_model(layers=1)).compiled()
    assert_same_logits(compiled, batch=2, capacity=100, widths=(1,), step=50)
    with pytest.raises(ValueError, match="compile: got True for model type 'llama'.*FailOnRecompileLimitHit"):
        assert_same_logits(compiled, batch=2, capacity=100, widths=(2,), step=50)


@pytest.mark.nightly
def test_inductor_on_the_embedded_pair():
    target, draft, tokenizer = load_embedded_pair()
    texts = [tokenizer(t)["input_ids"] for t in ("Once upon a time", "The dog was", "One day, a little girl named")]
    plain, compiled = (SpeculativeDecoder(target, draft, num_drafts=4, compile=how) for how in (False, True))
    expected = plain.generate(texts, max_new_tokens=80, eos_token_id=[], output_logits=True)
    result = compiled.generate(texts, max_new_tokens=80, eos_token_id=[], output_logits=True)
    assert result.tokens == expected.tokens
    for ours, theirs in zip(result.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    more = compiled.generate(texts[:2], max_new_tokens=150, eos_token_id=[])
    assert more.tokens == plain.generate(texts[:2], max_new_tokens=150, eos_token_id=[]).tokens
    assert counters["stats"]["unique_graphs"] <= 4  # of each model, [B, several] and [B, 1]
