"""Runs everything that a GPU has to do once, in seconds, before anything long begins.

    python bench/smoke.py --device cuda --json smoke.json

Every operation by every backend of the device, a step in a CUDA graph, attention, and decoding by captured steps.
Each is compared with the reference, or with itself without graphs. A failure does not keep the others from running.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import report
import torch
import typer
from measure import first_line
from specdec import Request, Scheduler, SpeculativeDecoder, load_embedded_pair
from specdec.models.forward.cached_model import CachedModel
from specdec_layers import linear
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_kernels import SamplingParams, speculative_step
from specdec_kernels.backends import unavailable
from specdec_kernels.testing import StepInputs, assert_same_draft, assert_same_step, random_step, reference_draft

BACKENDS = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}
Check = Callable[[], None]


def inputs_of(rule: str) -> StepInputs:
    """Several blocks of logits with a rest, and filters."""
    return random_step(3, 3, 5000, dtype=torch.bfloat16, rule=rule, temperature=(0.8, 0.0), top_k=(0, 50), top_p=0.95)


def draft(backend: str) -> None:
    inputs = inputs_of("token")
    logits = inputs.draft_logits[:, 0]
    expected, margin = reference_draft(inputs, logits, 0)
    assert_same_draft(inputs.draft(logits, 0, backend), expected, margin, inputs, logits, 0)


def verify(backend: str, rule: str) -> None:
    inputs = inputs_of(rule)
    assert_same_step(inputs.run(backend), *inputs.reference())


def captured(backend: str) -> None:
    """A replay gives what the call gave."""
    inputs = inputs_of("token").to(torch.device("cuda"))
    expected = inputs.run(backend)
    arguments = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = speculative_step(**arguments, backend=backend)
    out.tokens.zero_()
    graph.replay()
    assert torch.equal(out.tokens.cpu(), expected.tokens), f"got {out.tokens.tolist()}, want {expected.tokens.tolist()}"


def products(device: torch.device, dtype: torch.dtype) -> None:
    """Of few rows, each of which has the same bits alone. What is left of the inputs and outputs is no whole tile."""
    weight, x = (torch.randn(shape, device=device).to(dtype) for shape in ((1000, 4128), (1, 16, 4128)))
    found, expected = linear(x, weight), x.double() @ weight.double().T
    assert (found - expected).norm() < 4e-3 * expected.norm()
    assert all(torch.equal(linear(x[:, i : i + n], weight), found[:, i : i + n]) for i in (0, 7) for n in (1, 5, 8))


def attention(device: torch.device) -> None:
    """The logits of a random model with each attention of ours and with the model's own."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=101, num_key_value_heads=1, initializer_range=0.3, **sizes)
    model = LlamaForCausalLM(config).eval().to(device)
    logits = []
    with torch.inference_mode():
        for name in ("fused", "flex", "model") if device.type == "cuda" else ("native", "model"):
            cached = CachedModel(model, attention=name)
            cache = cached.new_cache(2, 200)
            cached.prefill(cache, [[i % 101 for i in range(n)] for n in (30, 130)])
            places = cache.lengths[:, None] + torch.arange(5, device=device)
            layout = cached.layout(places, places, 200)
            logits.append(cached(torch.arange(10, device=device).view(2, 5), cache, layout))
    for ours in logits[:-1]:
        torch.testing.assert_close(ours, logits[-1], rtol=1e-3, atol=1e-3)


def decoding(device: torch.device, new_tokens: int) -> None:
    """The embedded pair's texts, with graphs and without."""
    target, model, tokenizer = load_embedded_pair(device=device)
    prompts = tokenizer(["def add(a, b):", "import os\n"]).input_ids
    texts, replays = [], 0
    for graph_bytes in (0, 1 << 30):
        decoder = SpeculativeDecoder(target, model, 4, graph_bytes=graph_bytes)
        scheduler = Scheduler(decoder, rows=2, max_length=100)
        asked = [
            Request(p, new_tokens, SamplingParams(0.8), seed=i, id=i, eos_token_id=[]) for i, p in enumerate(prompts)
        ]
        outcomes = list(scheduler.run(asked))
        texts.append({o.request.id: o.tokens for o in outcomes})
        assert all(o.error is None for o in outcomes), [o.error for o in outcomes]
        replays = scheduler.batch.config.graphs.replays if scheduler.batch.config.graphs is not None else 0
    assert texts[0] == texts[1], "a text differs with graphs"
    assert device.type == "cpu" or replays > 0, "no step was replayed"


def checks(device: torch.device, quick: bool) -> Iterator[tuple[str, Check]]:
    for backend in BACKENDS[device.type]:
        yield f"draft_step, {backend}", partial(draft, backend)
        for rule in ("token", "block", "coupled"):
            yield f"speculative_step, {backend}, {rule}", partial(verify, backend, rule)
        if device.type == "cuda":
            yield f"speculative_step, {backend}, in a graph", partial(captured, backend)
    for dtype in (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.float32,):
        yield f"linear, {dtype}", partial(products, device, dtype)
    yield "attention", partial(attention, device)
    yield "decoding", partial(decoding, device, 4 if quick else 24)


def main(device: report.DeviceName = "cpu", quick: report.Quick = False, json_path: report.JsonPath = None) -> None:
    """Runs everything once."""
    where = report.read_device(device)
    results = report.Report("smoke", where, json_path, None, quick=quick)
    for backend in BACKENDS[where.type]:
        results.say({f"{backend} is missing": why for why in [unavailable(backend, where.type)] if why})
    for name, check in checks(where, quick):
        begun, error = time.perf_counter(), None
        try:
            check()
        except Exception as failure:
            error = first_line(failure)
            traceback.print_exc()
        results.add({"check": name, "seconds": round(time.perf_counter() - begun, 2), "error": error})
    results.show("smoke", results.rows, ("check", "seconds", "error"))
    results.finish()
    raise typer.Exit(int(any(row["error"] for row in results.rows)))


if __name__ == "__main__":
    typer.run(main)
