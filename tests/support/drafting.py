"""Drives drafters that need only the texts and no model: steps without a decoding loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import torch
from specdec.drafters import Copies, Drafter
from specdec.stats import Timer
from transformers import LogitsProcessor

from specdec_kernels import SamplingParams

from .models import generate, prompts, tiny_model


def start(
    drafter,
    prompts: list[list[int]],
    ends: list[frozenset[int]] | None = None,
    nodes: int = 0,
    owners: list | None = None,
):
    ends = [frozenset()] * len(prompts) if ends is None else ends
    owners = [None] * len(prompts) if owners is None else owners
    batch = SimpleNamespace(size=len(prompts), timer=Timer(), ends=ends, nodes=nodes, owners=owners)
    session = drafter.start(batch)
    session.begin(dict(enumerate(prompts)))
    return session


def draft(session, texts: list[list[int]], allowed: int | list[int]) -> list[list[int]]:
    """The session's drafts for each sequence."""
    return found(session, texts, allowed).tokens


def found(session, texts: list[list[int]], allowed: int | list[int]) -> Copies:
    """The session's drafts for each sequence, and how many tokens before them match. Checks their form, and that the
    same step gives the same drafts."""
    allowed = [allowed] * len(texts) if isinstance(allowed, int) else allowed
    step = SimpleNamespace(
        num_drafts=max(allowed),
        allowed=allowed,
        texts=texts,
        last_two=torch.tensor([(t[-2:-1] or t[-1:]) + t[-1:] for t in texts]),
    )
    before = [list(text) for text in texts]
    copies, again = session.propose(step), session.propose(step)
    assert isinstance(copies, Copies) and copies == again
    assert texts == before
    assert len(copies.tokens) == len(copies.matched) == len(texts)
    assert all(len(tokens) <= most for tokens, most in zip(copies.tokens, allowed, strict=True))
    return copies


def copied(text: list[int], start: int, count: int) -> list[int]:
    """Copies one token at a time, so that copied tokens may be copied again."""
    whole = list(text)
    for i in range(count):
        whole.append(whole[start + i])
    return whole[len(text) :]


class Repeats(LogitsProcessor):
    """Makes a text repeat the token ``period`` places before."""

    def __init__(self, period: int):
        self.period = period

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -self.period, None], 1e4)


def check_plain_texts(new: Callable[[], Drafter], num_drafts: int) -> None:
    """Decodes with a drafter: some drafts are accepted and some are not, and greedy and coupled texts equal those of
    plain decoding."""
    for temperature, rule in ((0.0, "token"), (1.0, "coupled")):
        result = _texts(new(), num_drafts, temperature, rule)
        assert result.drafter_error is None
        assert result.tokens == plain_texts(temperature, rule)
        assert 0 < result.stats.accepted < result.stats.drafted


@functools.cache
def plain_texts(temperature: float, rule: str) -> list[list[int]]:
    return _texts(None, 0, temperature, rule).tokens


def _texts(drafter: Drafter | None, num_drafts: int, temperature: float, rule: str):
    """Eight texts over four tokens only, so that every n-gram has occurred before."""
    return generate(
        tiny_model(),
        drafter,
        prompts(8, 1, 40),
        num_drafts,
        rule=rule,
        params=SamplingParams(temperature),
        seed=list(range(8)),
        logit_bias=dict.fromkeys(range(4), 30.0),
        max_new_tokens=60,
    )
