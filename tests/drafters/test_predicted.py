"""Predicted outputs: the place in a prediction against its definition, and texts that do not depend on predictions."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import specdec.loop.step
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec import Producer, PromptLookupDrafter, Request, Scheduler, SpeculativeDecoder
from specdec.drafters import predicted
from specdec.drafters.model import model_drafter
from specdec.drafters.predicted import Place, PredictedDrafter, PredictedSession
from specdec.evaluation.verify.chi_square import chi_square
from specdec.models.supported import cached_model
from specdec.sampling.grammar_masks import GrammarMasks
from specdec.stats import Timer
from support.crowds import check_empty, crowd, finish, scheduler
from support.models import prompts, pruned_draft, tiny_model, toy_model, tunable_pair
from transformers import PreTrainedModel

from specdec_kernels import SamplingParams
from specdec_kernels.testing import probabilities, text_distribution

exploring = settings(max_examples=200, deadline=None, derandomize=True)
few = st.lists(st.integers(0, 2), min_size=1, max_size=12)


# ---- the place --------------------------------------------------------------------------------------------


def proposed(prediction: list[int], output: list[list[int]], most: int) -> tuple[list[int], int]:
    """What is to be proposed after these pieces of output, and how many tokens before it match, from its definition."""
    place, last, text = 0, 0, []

    def same(end: int) -> int:
        return max(n for n in range(min(end, len(text)) + 1) if prediction[end - n : end] == text[len(text) - n :])

    for piece in output:
        text += piece
        for token in piece if place is not None else ():
            if place < len(prediction) and prediction[place] == token:
                place += 1
                last = place
            else:
                place = None
                break
        if place is None:
            found = {end: same(end) for end in range(len(prediction) + 1)}
            longest = max(found.values())
            ends = [end for end, n in found.items() if n == longest]
            if longest >= 2:
                place = last = next((end for end in ends if end > last), ends[0])
    return ([], 0) if place is None else (prediction[place : place + most], same(place))


@exploring
@given(prediction=few, output=st.lists(few.map(lambda piece: piece[:4]), max_size=6), prompt=few)
def test_the_place_is_that_of_a_search(prediction, output, prompt):
    place, text = Place(prediction, len(prompt)), list(prompt)
    for count, piece in enumerate([[], *output]):
        text += piece
        expected, matched = proposed(prediction, output[:count], 4)
        assert place.propose(text, 4) == place.propose(text, 4) == expected
        assert not expected or place.matched == matched


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([[1, 2]], [3, 4, 5]),
        ([[1, 2, 9], [4, 5]], [6, 7, 8]),  # a token replaced
        ([[1, 2, 9], [3, 4]], [5, 6, 7]),  # one more
        ([[1, 2, 4], [5]], [6, 7, 8]),  # one left out
        ([[1, 2, 9], [9]], []),
        ([[1, 2, 3, 4, 5, 6, 7, 8]], []),  # its end
    ],
)
def test_a_place_is_found_again(output, expected):
    assert proposed([*range(1, 9)], output, 3)[0] == expected  # the test's own definition does
    place = Place([*range(1, 9)], 0)
    for piece in itertools.accumulate(output):
        proposal = place.propose(piece, 3)
    assert proposal == expected


def test_of_equal_places_the_next_one_is_meant():
    lines = [5, 6, 1, 5, 6, 2, 5, 6, 3]
    place = Place(lines, 0)
    assert place.propose([5, 6, 1, 7], 2) == []
    assert place.propose([5, 6, 1, 7, 5, 6], 2) == [2, 5]
    assert place.propose([5, 6, 1, 7, 5, 6, 4, 5, 6], 2) == [3]


# ---- texts ------------------------------------------------------------------------------------------------


def beside(target: PreTrainedModel, draft, num_drafts: int, d2t=None) -> SpeculativeDecoder:
    """A decoder that drafts predictions, and the rest with ``draft``."""
    if isinstance(draft, PreTrainedModel):
        draft = model_drafter(draft, cached_model(target, "target"), d2t)
    return SpeculativeDecoder(target, PredictedDrafter(draft), num_drafts)


def run(s: Scheduler, requests: list[Request]):
    numbers = [s.submit(r) for r in requests]
    outcomes = finish(s)
    return [outcomes[n] for n in numbers]


WRAPPED = {
    "none": None,
    "model": tunable_pair(0.5, layers=1)[1],
    "lookup": PromptLookupDrafter(min_ngram=1),
}


@pytest.mark.parametrize("async_scheduling", (False, True))
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_texts_do_not_depend_on_predictions(wrapped, async_scheduling):
    """Predictions that are right, wrong, right in parts or missing, in one batch."""
    target = tunable_pair(0.5, layers=1)[0]
    for params in (None, SamplingParams(1.0)):
        requests = [replace(r, params=params, max_new_tokens=16, eos_token_id=[]) for r in crowd()]
        plain = run(scheduler(SpeculativeDecoder(target, None, 0), rule="coupled", max_length=40), requests)
        texts = [o.tokens for o in plain]
        edited = [*texts[2][:5], 100, *texts[2][5:9], *texts[2][10:]]
        predictions = (texts[0], prompts(1, 20, 20)[0], edited, None, texts[4])
        asked = [replace(r, prediction=p) for r, p in zip(requests, predictions, strict=True)]
        bounds = {"rule": "coupled", "max_length": 40, "async_scheduling": async_scheduling}
        s = scheduler(beside(target, WRAPPED[wrapped], 3), **bounds)
        outcomes = run(s, asked)
        assert [o.tokens for o in outcomes] == texts
        for right in (outcomes[0], outcomes[4]):
            assert right.stats.steps == 4 and right.stats.accepted == 12
        assert 0 < outcomes[2].stats.accepted and outcomes[2].stats.steps < 12
        assert (outcomes[3].stats.drafted == 0) == (wrapped == "none")
        assert s.drafter_error is None and not s.batch.session._session.places
        if params is None:
            check_empty(s)


def test_a_model_is_not_called_where_all_is_predicted_and_catches_up_later(monkeypatch):
    """The target is its own draft, so that whatever it drafts of a text that it knows is accepted."""
    monkeypatch.setattr(predicted, "LEAST_MATCH", 99)  # after its end, a prediction says nothing more
    model = tiny_model()
    requests = [Request(p, 40, eos_token_id=[]) for p in prompts(2, 3, 9)]
    texts = [o.tokens for o in run(Scheduler(SpeculativeDecoder(model, None, 0), rows=2, max_length=60), requests)]
    s = Scheduler(beside(model, model, 3), rows=2, max_length=60)
    whole = run(s, [replace(r, prediction=t) for r, t in zip(requests, texts, strict=True)])
    assert [o.tokens for o in whole] == texts and s.batch.draft_forwards == 0 and s.batch.steps == 10
    halves = [replace(requests[0], prediction=texts[0][:22]), replace(requests[1], prediction=texts[1][:14])]
    outcomes = run(s, halves)
    assert [o.tokens for o in outcomes] == texts and s.batch.draft_forwards > 0
    assert all(o.stats.accepted == o.stats.tested for o in outcomes)


def test_a_model_catches_up_with_a_row_that_was_predicted_beside_others(monkeypatch):
    """The target is its own draft: what it draws from q = p is accepted, if it knows the text. Tokens are few, so that
    some predictions are right by chance, and are not what the model drafted meanwhile."""
    monkeypatch.setattr(predicted, "LEAST_MATCH", 99)
    model, prediction = tiny_model(), [1, 2, 1, 1, 2, 2, 1, 2]
    s = Scheduler(beside(model, model, 4), rows=8, max_length=60, rule="token")
    few = {"params": SamplingParams(4.0), "logit_bias": {1: 200.0, 2: 200.0}, "eos_token_id": []}
    asked = [Request([5, 6, i], 24, seed=i, report_drafts=True, **few) for i in range(32)]
    asked[::2] = [replace(r, prediction=prediction) for r in asked[::2]]
    emitted, followed = {s.submit(r): [] for r in asked}, []
    while not s.idle:
        for output in s.step():
            text = emitted[output.number]
            if asked[output.number].prediction and text == prediction[: len(text)]:
                followed.append(output.produced_by.count(Producer.ACCEPTED))
            else:
                assert Producer.RECOVERED not in output.produced_by
            text += output.tokens
    assert sum(n >= 2 for n in followed) >= 3


def test_steps_without_drafts_after_predicted_ones_hide_nothing():
    """The loop knows that the session was asked before these steps, but not that the other drafter was not."""
    shown = []
    other = SimpleNamespace(begin=lambda prompts: None, observe=lambda texts, starts: shown.append(starts))
    masks = GrammarMasks(16, torch.device("cpu"))
    batch = SimpleNamespace(predictions=[[1, 2, 3]], ends=[frozenset()], timer=Timer(), grammars=masks)
    session = PredictedSession(other, batch)
    session.begin({0: [9, 8, 7]})
    session.propose(SimpleNamespace(allowed=[2], texts=[[9, 8, 7]], last_two=torch.tensor([[8, 7]])))
    for text, start in (([9, 8, 7, 1, 2, 3, 5, 6], 6), ([9, 8, 7, 1, 2, 3, 5, 6, 4], 8)):
        session.observe({0: text}, {0: start})
    assert shown == [{0: 1}, {0: 8}]


def test_steps_run_ahead_once_no_row_has_a_prediction():
    s = scheduler(beside(*tunable_pair(0.5, layers=1), 3), async_scheduling=True)
    s.submit(Request([5, 6, 7], 4, prediction=[1, 2, 3], eos_token_id=[]))
    s.submit(Request([5, 6], 25, eos_token_id=[]))
    ahead = []
    finish(s, lambda step, updates: ahead.append(s.batch.runs_ahead))
    assert ahead[0] is False and ahead[-2] is True


# ---- q ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ("token", "block"))
@pytest.mark.parametrize("draft", ("whole", "pruned"))
def test_q_of_predicted_rows_is_one_hot(monkeypatch, draft, rule):
    target, model = tunable_pair(0.5, layers=1)
    kept = torch.arange(0, 101, 2)
    d2t = kept if draft == "pruned" else None
    d = beside(target, pruned_draft(model, kept) if draft == "pruned" else model, 3, d2t)
    prediction = [4, 8, 3, 10, 12]  # a pruned model has no column of 3
    steps, step = [], specdec.loop.step.speculative_step

    def recorded(logits, tokens, q, **more):
        steps.append((tokens, q, more))
        return step(logits, tokens, q, **more)

    monkeypatch.setattr(specdec.loop.step, "speculative_step", recorded)
    s = Scheduler(d, rows=2, max_length=40, rule=rule)
    params = SamplingParams(0.7, top_p=0.9)
    run(s, [Request([5, 6], 12, params, 1, prediction=prediction), Request([9], 12, params, 2)])
    (tokens, q, drawn), (same, no_q, copied) = steps[:2]
    assert tokens[0].tolist() == prediction[:3] and (tokens[1] >= 0).all() and same is tokens
    assert q is not None and drawn["draft_stats"] is not None and drawn["num_drafts"].tolist() == [0, 3]
    assert no_q is None and copied["draft_stats"] is None and copied["num_drafts"].tolist() == [3, 0]
    assert s.drafter_error is None


def of_next(target, params: SamplingParams, text: tuple[int, ...]):
    with torch.inference_mode():
        logits = target(torch.tensor([text])).logits[0, -1].double()
    return probabilities(logits, params.temperature, top_k=params.top_k)


@pytest.mark.parametrize(
    ("rule", "count"),
    [
        ("token", 2000),
        ("block", 2000),
        *(pytest.param(r, 100_000, marks=pytest.mark.nightly) for r in ("token", "block")),
    ],
)
def test_the_distribution_of_texts(rule, count):
    """Half of the rows have a prediction, which is accepted now and then; their neighbours draft with a model."""
    target, draft = toy_model(0), toy_model(1)
    params = SamplingParams(1.3, top_k=4)
    predictions = ([3, 1, 2], None, [0, 0, 4, 1], None)
    s = Scheduler(beside(target, draft, 2), rows=500, max_length=8, rule=rule)
    requests = (Request([1], 3, params, i, [], prediction=predictions[i % 4]) for i in range(count))
    outcomes = sorted(s.run(requests), key=lambda o: o.number)
    assert s.drafter_error is None
    expected = text_distribution(lambda text: of_next(target, params, text), 3, (1,))
    for own in (outcomes[0::4], outcomes[2::4], outcomes[1::2]):
        assert 0.1 < sum(o.stats.accepted for o in own) / sum(o.stats.tested for o in own) < 0.9
        found = chi_square(Counter(tuple(o.tokens) for o in own), expected, level=1e-4)
        assert found.p_value > 1e-4, found
