"""A target over two processes: the same texts as in one, and an end in seconds when one of them fails."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from specdec import EarlyExitDrafter, Request, Scheduler, SpeculativeDecoder, load_embedded_pair
from specdec.models.ranks.channel import RanksParted
from specdec.models.supported import cached_model
from support.ranks import group

from specdec_kernels import SamplingParams

nightly = pytest.mark.nightly
TEXTS = (
    "def read(self, size=-1):\n",
    "import os",
    "class Reader:\n    def __init__(self",
    "for i in range(10):\n    x",
)
SETTINGS = {
    "greedy": {},
    "coupled": {"rule": "coupled", "params": SamplingParams(0.8, top_p=0.95), "seed": [1, 2, 3, 4]},
    "token": {"rule": "token", "params": SamplingParams(1.0, top_k=50), "seed": 5},
}


@pytest.fixture(scope="module")
def followers():
    with group(2) as others:
        yield others


@pytest.fixture(scope="module")
def divided(followers):
    """The embedded pair, its target over two processes."""
    return load_embedded_pair(tp=2)


@pytest.fixture(scope="module")
def prompts(pair):
    return pair[2](list(TEXTS)).input_ids


def both(pair, divided, prompts, decoder, **settings):
    """Texts of one process, and of two. They are equal: none of these comes upon logits whose difference is near the
    rounding's, which is 1e-5."""
    results = []
    for target, draft, _ in (pair, divided):
        made = SpeculativeDecoder(target, draft, **decoder)
        results.append(made.generate(prompts, max_new_tokens=24, eos_token_id=[], **settings))
    one, two = results
    assert two.tokens == one.tokens
    assert two.stats.accepted == one.stats.accepted > 0
    return one, two


@pytest.mark.parametrize("settings", ["greedy", *(pytest.param(name, marks=nightly) for name in ("coupled", "token"))])
def test_chains(pair, divided, prompts, settings):
    both(pair, divided, prompts, {"num_drafts": 4}, **SETTINGS[settings])


def test_trees(pair, divided, prompts):
    both(pair, divided, prompts, {"num_drafts": 4, "tree": 8}, params=SamplingParams(0.7), seed=[3, 4, 5, 6])


def test_logits_and_log_probabilities(pair, divided, prompts):
    one, two = both(pair, divided, prompts, {"num_drafts": 3}, output_logits=True, top_log_probs=0, prompt_log_probs=0)
    logits = [torch.cat(result.logits) for result in (one, two)]
    assert (logits[0] - logits[1]).abs().max() < 1e-4
    for a, b in zip(one.raw_log_probs, two.raw_log_probs, strict=True):
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-5


@nightly
def test_requests_arrive_while_others_are_decoded(pair, divided, prompts):
    """Two rows, so that each is taken again, and some begin as an earlier one did."""
    asked = [[*prompts[i % 4], *prompts[0][: i % 3]] for i in range(7)]
    found = []
    for target, draft, _ in (pair, divided):
        scheduler = Scheduler(SpeculativeDecoder(target, draft, num_drafts=3), rows=2, max_length=64, prefill_chunk=4)
        texts: dict[int, list[int]] = {}
        left = [Request(prompt, max_new_tokens=5 + i, eos_token_id=[]) for i, prompt in enumerate(asked)]
        while left or not scheduler.idle:
            for request in [left.pop(0) for _ in range(min(2, len(left)))]:
                scheduler.submit(request)
            for output in scheduler.step():
                texts.setdefault(output.number, []).extend(output.tokens)
        scheduler.close()
        found.append(texts)
    assert found[0] == found[1] and [*map(len, found[1].values())] == [5 + i for i in sorted(found[1])]


def test_a_prompt_begins_as_one_that_is_still_decoded(pair, divided, prompts):
    """What is stored of their common beginning is copied from row to row, by each process."""
    first = [*prompts[2], *prompts[3], *prompts[0]]
    second, found = [*first, *prompts[1]], []
    for target, draft, _ in (pair, divided):
        scheduler = Scheduler(SpeculativeDecoder(target, draft, num_drafts=3), rows=2, max_length=128, prefill_chunk=4)
        scheduler.submit(Request(first, max_new_tokens=40, eos_token_id=[]))
        texts: dict[int, list[int]] = {}
        left, reused = [Request(second, max_new_tokens=24, eos_token_id=[])], []
        while not scheduler.idle:
            for update in scheduler.step():
                texts.setdefault(update.number, []).extend(update.tokens)
                reused.append(update.sequence.reused)
            if texts and left:
                scheduler.submit(left.pop())
        scheduler.close()
        found.append((texts, max(reused)))
    assert found[0] == found[1] and found[1][1] >= len(first) // 4 * 4 - 4


def test_heads_and_keys_are_divided(pair, divided):
    """Each process has half of what is in layers. Norms, a thousandth, are in both."""
    one, two = (cached_model(target, "target") for target, _, _ in (pair, divided))
    assert 2 * two.slot_bytes() == one.slot_bytes()
    assert two.attention.name == one.attention.name  # the copies for it leave the divided layers as they are
    sizes = [sum(getattr(p, "_local_tensor", p).nbytes for p in m.parameters()) for m in (pair[0], divided[0])]
    assert 0.5 <= sizes[1] / sizes[0] < 0.51
    assert 0 < two.free_memory() < one.free_memory()


def test_errors_before_a_forward_leave_the_processes_together(divided, prompts):
    target, draft, _ = divided
    decoder = SpeculativeDecoder(target, draft)
    with pytest.raises(ValueError, match="max_new_tokens"):
        decoder.generate([prompts[0]], max_new_tokens=100_000)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="tp: got 2 under autocast"):
        decoder.generate([prompts[0]], max_new_tokens=4)
    assert len(decoder.generate([prompts[0]], max_new_tokens=4, eos_token_id=[]).tokens[0]) == 4


def test_what_is_refused_of_a_divided_target(divided):
    target, _, _ = divided
    with pytest.raises(ValueError, match="target: got one over several devices"):
        EarlyExitDrafter(target, 2)


@nightly
def test_a_model_is_loaded_again(followers):
    """Both processes do it when rank 0 asks, and an error about the files is the caller's."""
    target, draft, _ = load_embedded_pair(tp=2)
    del target
    gc.collect()
    target = load_embedded_pair(tp=2)[0]
    assert SpeculativeDecoder(target, draft).generate([[1, 2]], max_new_tokens=2).tokens
    assert followers[0].poll() is None


def test_a_follower_that_fails_ends_all_in_seconds(followers, divided):
    """The last test: nothing is decoded after it."""
    target, draft, _ = divided
    decoder = SpeculativeDecoder(target, draft)
    cached = decoder.target
    started = time.monotonic()
    with pytest.raises(RanksParted, match=r"rank 1 failed: KeyError: 'no such cache'"):
        with cached._leader.all_do("begin", cache="no such cache", row=0, kept=0):
            torch.distributed.all_reduce(torch.zeros(1))  # which the other one never enters
    with pytest.raises(RanksParted, match="rank 1 failed"):
        decoder.generate([[1, 2]], max_new_tokens=2)
    assert followers[0].wait(10) == 1
    assert time.monotonic() - started < 10
    assert "KeyError: 'no such cache'" in followers[0].stderr.read()
