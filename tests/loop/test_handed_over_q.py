"""The loop verifies with the very q that its drafts were drawn from: the same logits, unrounded, and their statistics.

A q that is nearly right biases the text by less than a test of texts can see."""

from __future__ import annotations

import functools

import pytest
import specdec.drafters.drawing
import specdec.loop.step
import torch
from support.models import generate, prompts, tunable_pair

from specdec_kernels import SamplingParams


def recorded(monkeypatch: pytest.MonkeyPatch, module, name: str) -> list:
    """(positional arguments, keyword arguments, result) of every call of ``module.name``."""
    calls, function = [], getattr(module, name)

    @functools.wraps(function)
    def recording(*arguments, **more):
        calls.append((arguments, more, function(*arguments, **more)))
        return calls[-1][2]

    monkeypatch.setattr(module, name, recording)
    return calls


@pytest.mark.parametrize("rule", ["token", "block"])
def test_q_is_what_was_drawn_from(monkeypatch, rule):
    draws = recorded(monkeypatch, specdec.drafters.drawing, "draft_step")
    steps = recorded(monkeypatch, specdec.loop.step, "speculative_step")
    temperature = torch.tensor([0.7, 1.3, 1.0])
    params = SamplingParams(temperature, top_p=0.95)
    generate(*tunable_pair(0.3), prompts(3, 2, 9), 3, params=params, rule=rule, max_new_tokens=20)
    compared = 0
    for (_, tokens, logits), more, _ in steps:
        drawn = [draws.pop(0) for _ in range(tokens.shape[1])]
        for j, (arguments, _, draw) in enumerate(drawn):
            assert torch.equal(tokens[:, j], draw.tokens)
            assert torch.equal(logits[:, j], arguments[0])
            cutoff, lse = (statistic[:, j] for statistic in more["draft_stats"])
            assert torch.equal(cutoff, draw.cutoff) and torch.equal(lse, draw.lse)
            of_token = logits[:, j].gather(1, tokens[:, j : j + 1])[:, 0] / temperature - lse
            counts = more["num_drafts"] > j  # a row whose sequence has ended keeps no temperature
            torch.testing.assert_close(of_token[counts], draw.log_q[counts], rtol=1e-5, atol=1e-5)
            compared += int(counts.sum())
    assert len(steps) > 3 and not draws and compared > 20
