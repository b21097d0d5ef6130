"""What benchmarks compare with has the distribution that it should have; what cannot run is unavailable by name."""

from __future__ import annotations

import sys
from types import ModuleType

import bench_kernels
import measure
import numpy as np
import peers
import pytest
import torch
from cases import Shape, StepInputs
from scipy import stats

CPU = torch.device("cpu")

P_LOGITS = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.0], [0.0, 2.0, 1.0, -1.0, 0.0, 1.0, -3.0, 0.5]])
Q_LOGITS = torch.tensor([[0.0, 1.0, 1.0, 1.0, -0.5, -1.0, 2.0, 0.0]])


def fits(tokens: torch.Tensor, distribution: torch.Tensor) -> bool:
    """Chi-square of draws against their distribution; a right sampler fails at one seed in a thousand."""
    counts = torch.bincount(tokens.flatten(), minlength=distribution.numel())
    expected = distribution.double().flatten()
    return stats.chisquare(counts.numpy(), np.asarray(expected / expected.sum()) * tokens.numel()).pvalue > 1e-3


@pytest.mark.parametrize("has_q", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_eager_peers_emit_the_target_distribution(has_q, temperature):
    draws = 40_000
    q = (Q_LOGITS / temperature).softmax(-1).expand(draws, 1, 8)
    torch.manual_seed(0)
    drafts = torch.multinomial(q[0, 0], draws, replacement=True)[:, None]
    draft = q if has_q else Q_LOGITS.expand(draws, 1, 8)
    tokens, n = peers.eager(temperature, has_q)(P_LOGITS.expand(draws, 2, 8), drafts, draft)
    p = (P_LOGITS / temperature).softmax(-1)
    assert ((tokens >= 0).sum(1) == n + 1).all()
    # A text of two tokens: where the draft was rejected, the second is drawn from its distribution.
    second = torch.multinomial(p[1], draws, replacement=True)
    second = torch.where(n == 1, tokens[:, 1], second)
    assert fits(tokens[:, 0] * 8 + second, p[0][:, None] * p[1])
    assert not fits(drafts, p[0])  # the test can tell p from q
    expected = torch.minimum(p[0], q[0, 0]).sum().item()
    assert abs(n.float().mean().item() - expected) < 5 * (0.25 / draws) ** 0.5


def test_eager_accepts_equal_distributions_and_never_what_p_excludes():
    distribution = torch.rand(64, 4, 16).softmax(-1)
    drafts = distribution[:, :3].argmax(-1)
    tokens, n = peers.eager_step(distribution, drafts, distribution[:, :3])
    assert (n == 3).all() and torch.equal(tokens[:, :3], drafts)
    excluded = distribution.clone().scatter_(2, torch.nn.functional.pad(drafts, (0, 1))[..., None], 0.0)
    tokens, n = peers.eager_step(excluded, drafts, distribution[:, :3])
    assert (n == 0).all() and (tokens[:, 0] != drafts[:, 0]).all() and (tokens[:, 1:] == -1).all()


@pytest.mark.parametrize(
    "filters, kept",
    [
        ({}, range(8)),
        ({"top_k": 4}, (0, 3, 4, 6)),
        ({"top_k": 6, "top_p": 0.85, "min_p": 0.25}, (0, 3, 6)),  # top_p drops 1 and 7, min_p 4
    ],
    ids=str,
)
def test_transformers_peer_emits_the_target_distribution(filters, kept):
    draws, kept = 1500, list(kept)
    q = peers.filtered(Q_LOGITS[None], filters)[0, 0]
    torch.manual_seed(0)
    drafts = torch.multinomial(q.softmax(-1), draws, replacement=True)[:, None]
    step = peers.transformers_step(1.0, filters)
    emitted = step(P_LOGITS.bfloat16().expand(draws, 2, 8), drafts, q.expand(draws, 1, 8))
    tokens = torch.stack([tokens[0, 0] for tokens in emitted])
    assert torch.isin(tokens, torch.tensor(kept)).all()
    assert fits(torch.searchsorted(torch.tensor(kept), tokens), P_LOGITS[0, kept].softmax(-1))


@pytest.mark.parametrize("sample", [bench_kernels.race, bench_kernels.multinomial])
def test_draft_peers_draw_from_their_distribution(sample):
    torch.manual_seed(0)
    tokens, q = sample(Q_LOGITS.expand(40_000, 8))
    distribution = Q_LOGITS[0].softmax(-1)
    assert fits(tokens, distribution)
    torch.testing.assert_close(q[0], distribution)


# ---- Peers that are not installed here: their functions' stand-ins take what the real ones document


def flashinfer_stub(seeded: bool) -> ModuleType:
    module = ModuleType("flashinfer.sampling")

    def softmax(logits, temperature=None, enable_pdl=None):
        assert logits.dim() == 2
        return (logits.float() / temperature).softmax(-1)

    def top_k_renorm_probs(probs, top_k, is_deterministic=False):
        kept = torch.where(probs >= probs.topk(top_k).values[:, -1:], probs, 0.0)
        return kept / kept.sum(-1, keepdim=True)

    def top_p_renorm_probs(probs, top_p, is_deterministic=False):
        falling, order = probs.sort(-1, descending=True)
        falling = torch.where(falling.cumsum(-1) - falling < top_p, falling, 0.0)
        kept = torch.zeros_like(probs).scatter(1, order, falling)
        return kept / kept.sum(-1, keepdim=True)

    def sample(draft_probs, draft_token_ids, target_probs, accepted=None, emitted=None, seed=None, offset=None):
        assert draft_token_ids.dtype == torch.int32 and draft_probs.dtype == target_probs.dtype == torch.float32
        assert (seed is not None) == seeded and (not seeded or seed.shape == offset.shape == (1,))
        tokens, n = peers.eager_step(target_probs, draft_token_ids.long(), draft_probs)
        return tokens.int(), n, n

    module.softmax, module.top_k_renorm_probs, module.top_p_renorm_probs = (
        softmax,
        top_k_renorm_probs,
        top_p_renorm_probs,
    )
    module.chain_speculative_sampling = sample
    if not seeded:
        module.chain_speculative_sampling = lambda q, tokens, p: sample(q, tokens, p)
    return module


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize(
    "filters, kept", [({}, range(8)), ({"top_k": 4}, (0, 3, 4, 6)), ({"top_k": 6, "top_p": 0.8}, (0, 3, 6))], ids=str
)
def test_flashinfer_peer_emits_the_target_distribution(monkeypatch, filters, kept, seeded):
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", flashinfer_stub(seeded))
    draws, kept, t = 20_000, list(kept), 0.8
    q = (peers.filtered(Q_LOGITS[None] / t, filters)[0, 0]).softmax(-1)
    torch.manual_seed(0)
    drafts = torch.multinomial(q, draws, replacement=True)[:, None].int()
    target, draft, noise = P_LOGITS.bfloat16().expand(draws, 2, 8), Q_LOGITS.expand(draws, 1, 8), torch.zeros(1).long()
    p = (P_LOGITS[0, kept].bfloat16() / t).float().softmax(-1)
    steps = {
        "from logits": (peers.flashinfer_step(t, filters), (target, drafts, draft, noise)),
        "with q": (peers.flashinfer_step(t, filters, "q"), (target, drafts, q.expand(draws, 1, 8), noise)),
    }
    for step, arguments in steps.values():
        tokens = step(*arguments)[0][:, 0]
        assert torch.isin(tokens, torch.tensor(kept)).all()
        assert fits(torch.searchsorted(torch.tensor(kept), tokens.long()), p)
    distribution = (P_LOGITS / t).softmax(-1).expand(draws, 2, 8)
    if not filters:
        tokens = peers.flashinfer_step(t, given="pq")(distribution, drafts, q.expand(draws, 1, 8), noise)[0]
        assert fits(tokens[:, 0].long(), distribution[0, 0])


def test_flashinfer_peer_refuses_a_filter_that_it_has_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", flashinfer_stub(True))
    with pytest.raises(ValueError, match="min_p"):
        peers.flashinfer_step(1.0, {"min_p": 0.1})


# ---- What cannot run


def test_what_cannot_run_is_unavailable_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", None)  # as if not installed
    with pytest.raises(ImportError, match="flashinfer"):
        peers.flashinfer_step(1.0)

    def fail(i):
        raise ValueError("no such kernel\nmore")

    ready, unavailable = measure.prepare([measure.Method("good", lambda i: i), measure.Method("bad", fail)], CPU, 0)
    assert [m.name for m in ready] == ["good"] and unavailable == {"bad": "ValueError: no such kernel"}


def test_peers_of_a_step(monkeypatch):
    """Every peer is a method or has a reason; what a variable leaves out says so."""
    monkeypatch.setenv(bench_kernels.WITHOUT_FLASHINFER, "1")
    inputs = StepInputs(Shape(2, 2, 100, "bfloat16"), "typical", 0.8, CPU, 2)
    methods, unavailable = bench_kernels.peer_methods(inputs, peers.Compiler(0.0))
    assert [m.name for m in methods] == ["eager", "eager+q", "transformers"]
    assert unavailable.keys() == {"compile", "flashinfer", "flashinfer+q", "flashinfer+p+q"}
    assert bench_kernels.WITHOUT_FLASHINFER in unavailable["flashinfer"]
    tokens, n = methods[0].run(0)
    assert tokens.shape == (2, 3) and methods[0].warm(1)[0].shape == (2, 3)
    filtered = inputs.with_settings({"top_k": 5}, "token")
    methods, unavailable = bench_kernels.peer_methods(filtered, peers.Compiler(0.0))
    assert [m.name for m in methods] == ["transformers"] and "top_k" in unavailable["eager"]


def test_transformers_is_left_out_where_it_divides_0_by_0():
    """The drafts of two of three steps are tokens that its filters exclude, where q = p."""
    inputs = StepInputs(Shape(2, 2, 100, "bfloat16"), "all_accepted", 0.8, CPU, 3).with_settings({"top_k": 5}, "token")
    wanted = ["transformers"]
    assert bench_kernels.peer_methods(inputs, peers.Compiler(0.0), wanted)[1] == {}
    step = peers.transformers_step(0.8, inputs.filters)
    inputs.tokens[1:] = inputs.draft[1:].argmin(-1)
    with pytest.raises(RuntimeError, match="probability tensor"):
        step(*inputs.arguments("target", "tokens", "draft_float32")(1))
    methods, unavailable = bench_kernels.peer_methods(inputs, peers.Compiler(0.0), wanted)
    assert methods == [] and "it divides 0 by 0" in unavailable["transformers"]
    inputs.draft[1:] += torch.randn(inputs.draft[1:].shape)  # q is another distribution, and p - q has mass
    del inputs.draft_float32
    assert bench_kernels.peer_methods(inputs, peers.Compiler(0.0), wanted)[1] == {}


def test_ready_made_inputs_follow_the_filters():
    """q of a filtered step has the distribution that its drafts were drawn from: nothing outside the five most likely
    tokens."""
    inputs = StepInputs(Shape(3, 2, 50, "float32"), "typical", 0.8, CPU, 2)
    assert inputs.draft_probs.gt(0).all()
    filtered = inputs.with_settings({"top_k": 5}, "token")
    q = filtered.draft_probs
    assert (q.gt(0).sum(-1) == 5).all() and torch.allclose(q.sum(-1), torch.ones(q.shape[:-1]))
    assert q.gather(-1, filtered.tokens[..., None]).gt(0).all()
    assert torch.equal(filtered.tokens_int32.long(), filtered.tokens)
    assert (filtered.draft_float32.gt(-torch.inf).sum(-1) == 5).all() and inputs.draft_probs.gt(0).all()
