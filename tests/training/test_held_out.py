"""alpha and tau from one forward, against decoders that draw drafts."""

from __future__ import annotations

import random

import pytest
import torch
from specdec import SpeculativeDecoder
from specdec.training.held_out import TEMPERATURES, beginnings, expected_counts, worth, write
from support.models import prompts, tunable_pair

from specdec_kernels import SamplingParams

NEW, K = 24, 3


@pytest.fixture(scope="module")
def pair():
    return tunable_pair(0.4)


def walked(chances: list[float], k: int, chance: random.Random) -> tuple[int, int, int]:
    """A decoder that emits a text of len(chances) tokens."""
    at = steps = tested = accepted = 0
    while at < len(chances):
        steps, room = steps + 1, min(k, len(chances) - at - 1)
        for _ in range(room):
            tested += 1
            if chance.random() >= chances[at]:
                break
            accepted, at = accepted + 1, at + 1
        at += 1
    return steps, tested, accepted


@pytest.mark.parametrize("k", [1, 2, 5, 50])
def test_expected_counts_are_the_mean_of_walks(k):
    chance = random.Random(0)
    chances = [chance.choice([0.0, 0.3, 0.8, 1.0]) for _ in range(17)]
    found = expected_counts(chances, k)
    walks = [walked(chances, k, chance) for _ in range(4000)]
    for i, expected in enumerate(found):
        mean = sum(w[i] for w in walks) / len(walks)
        spread = (sum((w[i] - mean) ** 2 for w in walks) / len(walks) ** 2) ** 0.5
        assert abs(mean - expected) < 5 * spread + 1e-9


def test_certain_counts():
    assert expected_counts([1.0] * 10, 4) == (2, 8, 8)
    assert expected_counts([0.0] * 10, 4) == (10, 9, 0)  # the last token is never drafted
    assert expected_counts([], 4) == (0, 0, 0)


def test_greedy_worth_is_what_a_decoder_counts(pair):
    given = prompts(6, 4, 12)
    written = write(pair[0], given, NEW, seed=0)
    greedy = worth(pair[1], written, K)[0]
    stats = SpeculativeDecoder(*pair, K).generate(given, max_new_tokens=NEW, eos_token_id=[]).stats
    assert 0.1 < stats.alpha < 0.95 and stats.emitted == 6 * NEW
    assert greedy.temperature == 0
    assert (greedy.alpha, greedy.tau) == (pytest.approx(stats.alpha), pytest.approx(stats.tau))


def test_sampled_worth_is_what_decoders_count_on_average(pair):
    given = prompts(40, 4, 12)
    written = write(pair[0], given, NEW, seed=0)
    sampled = worth(pair[1], written, K)[1]
    params = SamplingParams(temperature=1.0)
    found = SpeculativeDecoder(*pair, K).generate(
        given * 5, max_new_tokens=NEW, params=params, seed=list(range(200)), eos_token_id=[], rule="token"
    )
    assert sampled.temperature == 1
    assert abs(sampled.alpha - found.stats.alpha) < 0.05 and abs(sampled.tau - found.stats.tau) < 0.15


def test_texts_do_not_depend_on_who_drafts(pair):
    given = prompts(3, 4, 12)
    plain, drafted = write(pair[0], given, NEW, 5), write(pair[0], given, NEW, 5, pair[1])
    assert [(w.new, w.temperature) for w in plain] == [(w.new, w.temperature) for w in drafted]
    assert [w.temperature for w in plain] == [t for t in TEMPERATURES for _ in given]
    again = write(pair[0], given, NEW, 6)
    assert [w.new for w in again if w.temperature] != [w.new for w in plain if w.temperature]


def test_a_draft_that_is_the_target_is_always_right(pair):
    for found in worth(pair[0], write(pair[0], prompts(2, 4, 12), NEW, 0), K):
        assert found.alpha == pytest.approx(1, abs=1e-4) and found.tau == pytest.approx(K + 1, abs=1e-3)


def test_beginnings_are_some_of_the_blocks():
    blocks = torch.arange(40).view(8, 5)
    found = beginnings(blocks, 3, 2, 0)
    assert len(found) == 3 and all(row in blocks[:, :2].tolist() for row in found)
    assert found == beginnings(blocks, 3, 2, 0) != beginnings(blocks, 3, 2, 1)
    assert len(beginnings(blocks, 30, 2, 0)) == 8
