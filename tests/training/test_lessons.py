"""What is learned from in which step, and that the target's own texts are its own."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from specdec import SpeculativeDecoder
from specdec.training.lessons import Lessons, Packed
from specdec.training.settings import DistillSettings
from support.models import tiny_model, tunable_pair

from specdec_kernels import SamplingParams

SIZE, LENGTH, PROMPT = 2, 12, 4


def lessons(sources: dict[str, float], draft=None, seed: int = 0) -> Lessons:
    given = Packed([list(range(100))] * 3, LENGTH, SIZE, seed)
    target, own = tunable_pair(0.4)
    settings = DistillSettings(seed=seed, text=sources, batch_size=SIZE, length=LENGTH, at_once=5, prompt=PROMPT)
    return Lessons(given, target, own if draft is None else draft, settings)


def test_sources_have_their_shares():
    found = lessons({"data": 0.5, "target": 0.3, "draft": 0.2})
    assert Counter(found.source(step) for step in range(1000)) == {"data": 500, "target": 300, "draft": 200}
    first = [found.source(step) for step in range(10)]
    assert Counter(first) == {"data": 5, "target": 3, "draft": 2}
    assert [lessons({"data": 0.5, "target": 0.3, "draft": 0.2}).source(step) for step in reversed(range(10))] == first[
        ::-1
    ]


def test_given_texts_come_in_the_order_of_their_blocks():
    found = lessons({"data": 0.5, "draft": 0.5})
    given = Packed([list(range(100))] * 3, LENGTH, SIZE, 0)
    steps = [step for step in range(8) if found.source(step) == "data"]
    for number, step in enumerate(steps):
        tokens, blocks = found.batch(step)
        assert torch.equal(tokens, given.blocks[blocks]) and torch.equal(blocks, given.batch(number))


def test_written_texts_begin_with_given_ones_and_are_used_up():
    found = lessons({"target": 1.0})
    batches = [found.batch(step) for step in range(4)]
    assert all(tokens.shape == (SIZE, LENGTH) and blocks is None for tokens, blocks in batches)
    beginnings = found._given.blocks[:, :PROMPT].tolist()
    assert all(row in beginnings for tokens, _ in batches for row in tokens[:, :PROMPT].tolist())
    assert len({tuple(row) for tokens, _ in batches for row in tokens.tolist()}) == 8  # six at once, and then others
    assert len(found.written["target"]) == 4  # six were written for step 3


def test_the_targets_texts_are_its_own_whatever_drafts():
    one, other = lessons({"target": 1.0}), lessons({"target": 1.0}, draft=tiny_model(layers=1, seed=9))
    assert torch.equal(one.batch(0)[0], other.batch(0)[0])
    assert not torch.equal(one.batch(0)[0], lessons({"target": 1.0}, seed=1).batch(0)[0])


def test_the_drafts_texts_are_the_drafts():
    found = lessons({"draft": 1.0})
    tokens, _ = found.batch(0)
    chance = torch.Generator().manual_seed(0)
    torch.randint(len(found._given.blocks), (6,), generator=chance)
    seeds = torch.randint(2**62, (6,), generator=chance).tolist()
    alone = SpeculativeDecoder(tunable_pair(0.4)[1], None).generate(
        tokens[:, :PROMPT].tolist(),
        None,
        LENGTH - PROMPT,
        SamplingParams(temperature=1.0),
        seeds[:SIZE],
        [],
        rule="coupled",
    )
    assert alone.tokens == tokens[:, PROMPT:].tolist()


@pytest.mark.parametrize("source", ["target", "draft"])
def test_texts_to_come_are_all_that_a_resumed_training_needs(source):
    found, resumed = lessons({source: 1.0}), lessons({source: 1.0})
    before = [found.batch(step)[0] for step in range(5)]
    resumed.written = {source: torch.cat([before[1], before[2]])}
    for step in range(1, 5):
        assert torch.equal(resumed.batch(step)[0], before[step])
