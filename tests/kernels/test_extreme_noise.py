"""The smallest and the largest random numbers: u is in the open interval, and small u keep their resolution.

Only one word in 2^32 is 0, so seeds that produce it were searched for. The first test checks that they still do."""

from __future__ import annotations

import math

import pytest
import torch

from specdec_kernels import SamplingParams, draft_step, speculative_step
from specdec_kernels.backends import reference
from specdec_kernels.testing import device_of

ZERO, ZERO_TOKEN = 652_871_865, 3  # with this seed, this token's word in the race of position 0 is 0: u = 2^-33
TOP, TOP_TOKEN = 29_710_534, 0  # with this one, it is almost 2^32: u = 1 - 2^-24, and E = 16.6
TOP_TEST = 323_239  # with this one, so is the word that tests the first draft at position 0
ALMOST = 2**32 - 128  # from here on, a word becomes 2^32 in float32


def words(seed: int, stream: int, position: int = 0) -> list[int]:
    index = torch.arange(4)[None]
    return reference.philox(torch.tensor([seed]), index, torch.tensor([position]), 0, stream).tolist()[0]


def race(backend: str, seed: int, weights: dict[int, float]) -> int:
    """The winner among four tokens in the race of rule ``coupled`` at position 0."""
    logits = torch.full((1, 4), -torch.inf)
    for token, weight in weights.items():
        logits[0, token] = math.log(weight)
    common = {"seed": seed, "position": 0, "offset": 0, "rule": "coupled", "backend": backend}
    return int(draft_step(logits.to(device_of(backend)), SamplingParams(), **common).tokens)


def test_the_numbers_are_extreme():
    assert words(ZERO, reference.RACE)[ZERO_TOKEN] == 0
    assert words(TOP, reference.RACE)[TOP_TOKEN] >= ALMOST
    assert words(TOP_TEST, reference.ACCEPT)[0] >= ALMOST


@pytest.mark.parametrize(("weight", "winner"), [(1e-9, ZERO_TOKEN), (1e-10, 0)])
def test_the_smallest_number_has_its_value(backend, weight, winner):
    """E = 2^-33 races against E = 0.23 of a token with weight 1. If E were 0, the weight would not matter, and with u
    of 24 bits E would be larger."""
    assert race(backend, ZERO, {0: 1.0, ZERO_TOKEN: weight}) == winner


@pytest.mark.parametrize(("weight", "winner"), [(0.02, 1), (0.005, TOP_TOKEN)])
def test_the_largest_number_has_its_value(backend, weight, winner):
    """E = 16.6 of a token with weight 1 races against 0.21. With u = 1, E would be infinite or the largest power of
    2."""
    assert race(backend, TOP, {TOP_TOKEN: 1.0, 1: weight}) == winner


@pytest.mark.parametrize("rule", ["token", "block"])
def test_equal_probabilities_are_accepted_whatever_u(backend, rule):
    """p(x) = q(x), though p and q differ elsewhere. If u could be 1, the draft would be rejected."""
    infinity = torch.inf
    target = torch.tensor([[[0.0, 0.0, -infinity], [0.0, 0.0, 0.0]]], device=device_of(backend))
    draft = torch.tensor([[[0.0, -infinity, 0.0]]], device=target.device)
    tokens = torch.zeros((1, 1), dtype=torch.int64, device=target.device)
    common = {"params": SamplingParams(), "seed": TOP_TEST, "position": 0, "rule": rule, "backend": backend}
    assert speculative_step(target, tokens, draft, **common).num_accepted.tolist() == [1]
