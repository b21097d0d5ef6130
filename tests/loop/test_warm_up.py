"""Forwards that are recorded before the first text: it then runs no modules, and is the same text."""

from __future__ import annotations

import copy
import math

import pytest
from specdec import AdaptiveDrafts, EarlyExitDrafter, Request, Scheduler, SpeculativeDecoder, SuffixDrafter
from specdec.loop import warm_up
from support.models import prompts, tiny_model

NEW = {"max_new_tokens": 40, "eos_token_id": []}


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch):
    monkeypatch.setattr(warm_up, "LONG", math.inf)


def repeated(seed: int) -> list[int]:
    """A prompt that repeats itself, so that drafts are found."""
    return prompts(1, 7, 7, seed=seed)[0] * 4


@pytest.mark.parametrize("num_drafts", [0, 3, AdaptiveDrafts(6)])
def test_a_first_text_replays_what_was_recorded(num_drafts):
    cold, warm = (SpeculativeDecoder(tiny_model(), SuffixDrafter(), num_drafts) for _ in range(2))
    warm.warm_up()
    recordings = warm.target.forwards.recordings
    before, replays = recordings.first_runs, recordings.replays
    assert before == len(warm._lengths.widths) > 0 or num_drafts == 0 and before == 1
    texts = [decoder.generate([repeated(1)], **NEW) for decoder in (warm, cold)]
    assert texts[0].tokens == texts[1].tokens and recordings.first_runs == before
    assert recordings.replays - replays == texts[0].stats.steps


def test_times_are_known_before_the_first_text():
    """Of drafts that are copied. Those of others take forwards of their own."""
    target = tiny_model()
    copies, drafts = (SpeculativeDecoder(target, d) for d in (SuffixDrafter(), EarlyExitDrafter(target, 1)))
    for decoder in (copies, drafts):
        assert decoder.costs_of(1) is None
        decoder.warm_up()
    assert copies._lengths.times(1).is_known and not drafts._lengths.times(1).is_known


def test_a_scheduler_is_warmed_up_for_one_text_among_others():
    decoder = SpeculativeDecoder(tiny_model())
    scheduler = Scheduler(decoder, rows=3, max_length=80)
    list(scheduler.run([Request(prompts(1, 5, 5)[0], 4)]))
    scheduler.warm_up()  # at any time, in the middle of texts, too
    recordings = decoder.target.forwards.recordings
    scheduler.submit(Request(repeated(2), 30, eos_token_id=[]))
    for _ in range(9):  # until steps have one row
        scheduler.step()
    before, expected = recordings.first_runs, SpeculativeDecoder(tiny_model(), None, 0)
    scheduler.warm_up()
    while not scheduler.idle:
        outputs = scheduler.step()
    assert recordings.first_runs == before
    assert outputs[-1].sequence.tokens == expected.generate([repeated(2)], max_new_tokens=30, eos_token_id=[]).tokens[0]


@pytest.mark.parametrize("model", ["bloom", "eager"])
def test_what_cannot_be_recorded_once_for_all_is_no_error(model):
    target = tiny_model("bloom") if model == "bloom" else copy.deepcopy(tiny_model())
    if model == "eager":
        target.set_attn_implementation("eager")
    decoder = SpeculativeDecoder(target)
    expected = decoder.generate([repeated(3)], **NEW).tokens
    decoder.warm_up()
    assert decoder.generate([repeated(3)], **NEW).tokens == expected


def test_nothing_is_recorded_for_trees():
    target = tiny_model()
    decoder = SpeculativeDecoder(target, SuffixDrafter(), 3, tree=6)
    decoder.warm_up()
    assert decoder.nodes == 6 and decoder.target.forwards.recordings.first_runs == 0


def test_large_models_are_left_alone(monkeypatch):
    monkeypatch.setattr(warm_up, "LONG", 0.0)
    decoder = SpeculativeDecoder(tiny_model())
    decoder.warm_up()
    assert decoder.target.forwards.recordings.first_runs == 1 and decoder.costs_of(1) is None
