"""Both operations give the same results in CUDA graphs, under torch.compile(mode="reduce-overhead"), and on other
streams and devices.

Graphs need a GPU. Without one, only the comparison is tested: it must accept a correct stand-in for a graph, and reject
wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from support.arrangements import identical
from support.captured import called, cuda_graph, keeps, on_gpu, stale

from specdec_kernels import SamplingParams, TokenTable, draft_step, speculative_step
from specdec_kernels.testing import random_step
from specdec_kernels.testing.inputs import mapped

GPU_BACKENDS = ("cuda", "triton")
FORMS = {
    "token": ("stats", "one_hot"),
    "block": ("stats", "full", "reduced"),
    "coupled": ("full", "reduced"),
}
RULES_AND_FORMS = [(rule, form) for rule, forms in FORMS.items() for form in forms]
FILTERS = {"top_k": (0, 20, 3), "top_p": (0.9, 1.0, 0.6), "min_p": (0.0, 0.02, 0.1)}
PENALTIES = {"table": 7, "repetition_penalty": (1.3, 1.0), "presence_penalty": (0.5,), "frequency_penalty": (0.2, 0.0)}
SAMPLING = {"plain": {}, "filters": FILTERS, "all": {**FILTERS, **PENALTIES}}
SHAPE = (4, 3, 2050)  # B, K, V


class Loop(NamedTuple):
    """All tensors of a step of a decoding loop: K drafts, then the verification."""

    target_logits: torch.Tensor
    draft_logits: torch.Tensor
    params: SamplingParams
    seed: torch.Tensor
    position: torch.Tensor
    num_drafts: torch.Tensor
    table: TokenTable | None
    d2t: torch.Tensor | None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Loop:
        """A copy with ``function`` applied to every tensor."""
        return Loop(*mapped(tuple(self), function))

    def tensors(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        self.map(lambda t: found.append(t) or t)
        return found

    def fill(self, source: Loop) -> None:
        """Writes the values of ``source`` into these tensors."""
        for mine, other in zip(self.tensors(), source.tensors(), strict=True):
            mine.copy_(other)


def loop_of(rule: str, form: str, sampling: str, random_state: int, device: torch.device) -> Loop:
    """Inputs whose values, but not shapes, all depend on ``random_state``."""
    batch, num_drafts, vocabulary = SHAPE
    options = {"reduced": 1500} if form == "reduced" else {}
    spread = {
        n: [*v[random_state % len(v) :], *v] if isinstance(v, tuple) else v for n, v in SAMPLING[sampling].items()
    }
    inputs = random_step(
        batch, num_drafts, vocabulary, dtype=torch.bfloat16, rule="token", random_state=random_state, drafter="cpu",
        temperature=((0.8, 0.0, 1.3, 0.5), (0.5, 1.1, 0.0, 0.9))[random_state % 2], **options, **spread,
    )  # fmt: skip
    num = (torch.arange(batch) + random_state) % (num_drafts + 1)
    made = Loop(inputs.target_logits, inputs.draft_logits, inputs.params, inputs.seed, inputs.position, num,
                inputs.table, inputs.d2t)  # fmt: skip
    return made.map(lambda t: t.to(device))


def decode(loop: Loop, rule: str, form: str, backend: str) -> list[torch.Tensor]:
    """Calls ``draft_step`` K times, then ``speculative_step``. Returns all their results."""
    common = {"params": loop.params, "seed": loop.seed, "position": loop.position, "table": loop.table}
    common |= {"rule": rule, "backend": backend}
    drafts, tokens = [], loop.seed.new_empty((len(loop.seed), 0))
    for i in range(loop.draft_logits.shape[1]):
        step = draft_step(loop.draft_logits[:, i], offset=i, drafts=tokens, d2t=loop.d2t, **common)
        drafts.append(step)
        tokens = torch.cat([tokens, step.tokens[:, None]], 1)
    q: dict = {"draft_logits": None}
    if rule != "coupled" and form != "one_hot":
        q |= {"draft_logits": loop.draft_logits, "d2t": loop.d2t}
        if form == "stats":
            q["draft_stats"] = tuple(torch.stack([getattr(d, n) for d in drafts], 1) for n in ("cutoff", "lse"))
    out = speculative_step(
        loop.target_logits, tokens, **q, num_drafts=loop.num_drafts, log_probs=True, **common
    )  # fmt: skip
    return [t for step in (*drafts, out) for t in step if t is not None]


def replays_are_right(
    capture: Callable, rule: str, form: str, sampling: str, backend: str, device: torch.device
) -> None:
    """Captures a step once and replays it after all of its inputs have changed in place."""
    sources = [loop_of(rule, form, sampling, i, device) for i in range(4)]
    buffers = sources[0].map(torch.clone)
    replay = capture(lambda: decode(buffers, rule, form, backend), buffers)
    seen = []
    for source in (*sources, sources[1]):
        buffers.fill(source)
        got = [t.clone() for t in replay()]
        assert identical(got, decode(source, rule, form, backend))
        seen.append(str(got[-6].tolist()))
    assert len({*seen}) == 4 and seen[1] == seen[4]  # other inputs give other tokens


@on_gpu
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(("rule", "form"), RULES_AND_FORMS)
@pytest.mark.parametrize("gpu_backend", GPU_BACKENDS)
def test_graph_replay(gpu_backend, rule, form, sampling):
    replays_are_right(cuda_graph, rule, form, sampling, gpu_backend, torch.device("cuda"))


def compiled_is_right(rule: str, sampling: str, of: str, device: torch.device, **options) -> None:
    """Several replays on different inputs; the first ones warm up and record. Each overwrites the previous outputs."""
    torch._dynamo.reset()
    form = FORMS[rule][0]
    compiled = torch.compile(decode, fullgraph=True, dynamic=False, **options)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for random_state in range(6):
            source = loop_of(rule, form, sampling, random_state, device)
            torch.compiler.cudagraph_mark_step_begin()
            got = [t.clone() for t in compiled(source, rule, form, of)]
            assert identical(got, decode(source, rule, form, of))


@on_gpu
@pytest.mark.parametrize("sampling", ["plain", "all"])
@pytest.mark.parametrize("rule", FORMS)
@pytest.mark.parametrize("gpu_backend", GPU_BACKENDS)
def test_reduce_overhead(gpu_backend, rule, sampling):
    counters = torch._dynamo.utils.counters["inductor"]
    counters.clear()
    compiled_is_right(rule, sampling, gpu_backend, torch.device("cuda"), mode="reduce-overhead")
    assert counters["cudagraph_skips"] == 0  # else it ran without graphs


@on_gpu
@pytest.mark.parametrize("rule", FORMS)
@pytest.mark.parametrize("gpu_backend", GPU_BACKENDS)
def test_on_another_stream(gpu_backend, rule):
    """The operations run on the current stream, after work there that computes their inputs."""
    form, device = FORMS[rule][0], torch.device("cuda")
    source, buffers = (loop_of(rule, form, "all", i, device) for i in (1, 0))
    want = decode(source, rule, form, gpu_backend)
    decode(buffers, rule, form, gpu_backend)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # cycles: tens of milliseconds
        buffers.fill(source)
        got = decode(buffers, rule, form, gpu_backend)
    stream.synchronize()
    assert identical(got, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("rule", FORMS)
@pytest.mark.parametrize("gpu_backend", GPU_BACKENDS)
def test_on_a_device_that_is_not_current(gpu_backend, rule):
    form = FORMS[rule][0]
    with torch.cuda.device(0):
        here, there = (
            decode(loop_of(rule, form, "all", 1, torch.device("cuda", i)), rule, form, gpu_backend) for i in (0, 1)
        )
    assert {t.device.index for t in there} == {1}
    assert identical([t.cpu() for t in there], [t.cpu() for t in here])


# ---- The comparison itself, on a CPU


@pytest.mark.parametrize(("rule", "form"), RULES_AND_FORMS)
def test_the_comparison_passes_what_is_right(rule, form):
    for sampling in SAMPLING:
        replays_are_right(called, rule, form, sampling, "cpu", torch.device("cpu"))


INPUTS = ("target_logits", "draft_logits", "temperature", "top_k", "top_p", "min_p", "seed", "position", "num_drafts")


@pytest.mark.parametrize("capture", [stale, *(keeps(i) for i in range(len(INPUTS)))], ids=["everything", *INPUTS])
def test_the_comparison_finds_what_a_graph_keeps(capture):
    tensors = loop_of("token", "stats", "filters", 0, torch.device("cpu")).tensors()
    assert len(tensors) == len(INPUTS)
    with pytest.raises(AssertionError):
        replays_are_right(capture, "token", "stats", "filters", "cpu", torch.device("cpu"))


def test_the_comparison_of_compiled_steps():
    compiled_is_right("block", "all", "cpu", torch.device("cpu"), backend="aot_eager")
