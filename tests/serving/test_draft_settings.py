"""What a request asks of its drafts: how many, and to be told of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from specdec import AdaptiveDrafts, Output, Producer, PromptLookupDrafter, Request, Scheduler, SpeculativeDecoder
from specdec.drafters.predicted import PredictedDrafter
from support.crowds import ROWS, crowd, decoder, finish, scheduler
from support.models import tunable_pair

CAPS = (2, 0, None, 1, 3)  # of K = 3


def run(s: Scheduler, requests: list[Request]) -> tuple[list, list[list[Output]]]:
    """The outcomes and the outputs of each request, by number."""
    outputs: list[list[Output]] = [[] for _ in requests]
    for request in requests:
        s.submit(request)

    def collect(step, updates):
        for update in updates:
            if isinstance(update, Output):
                outputs[update.number].append(update)

    outcomes = finish(s, collect)
    return [outcomes[i] for i in range(len(requests))], outputs


@pytest.mark.parametrize("async_scheduling", (False, True))
@pytest.mark.parametrize("adaptive", (False, True))
def test_caps_and_reports_of_drafts(async_scheduling, adaptive):
    """No text depends on them, every row drafts up to its own cap, and the reports are what was counted."""
    target, draft = tunable_pair(0.5, layers=1)
    num_drafts = AdaptiveDrafts(3, costs=[1.0, 1.01, 1.02, 1.03]) if adaptive else 3
    requests = [replace(r, eos_token_id=[]) for r in crowd()]
    capped = [replace(r, num_drafts=n, report_drafts=True) for r, n in zip(requests, CAPS, strict=True)]
    results = [
        run(scheduler(SpeculativeDecoder(target, *pair), rule="coupled", async_scheduling=async_scheduling), asked)
        for pair, asked in (((None, 0), requests), ((draft, num_drafts), capped))
    ]
    (plain, quiet), (outcomes, outputs) = results
    assert [o.tokens for o in outcomes] == [o.tokens for o in plain]
    assert all(e.drafts is None for each in quiet for e in each)
    for outcome, own, most in zip(outcomes, outputs, CAPS, strict=True):
        lengths = [len(e.drafts) for e in own]
        assert max(lengths) <= (top := 3 if most is None else most)
        assert max(lengths) == top or adaptive
        assert sum(lengths) == outcome.stats.drafted
        for e in own:
            accepted = e.produced_by.count(Producer.ACCEPTED)
            assert e.tokens[:accepted] == e.drafts[:accepted]
            assert e.drafts[accepted : accepted + 1] != e.tokens[accepted : accepted + 1]
            assert (len(e.drafts) > accepted) == (e.produced_by[-1] == Producer.RECOVERED)


def test_rows_that_may_not_draft_are_decoded_plainly():
    s = scheduler(decoder())
    outcomes, outputs = run(s, [replace(r, num_drafts=0, report_drafts=True) for r in crowd()])
    assert s.batch.draft_forwards == 0 and {o.stats.drafted for o in outcomes} == {0}
    assert s.batch.session.alive and {tuple(e.drafts) for each in outputs for e in each} == {()}
    plain, _ = run(scheduler(SpeculativeDecoder(decoder().target.model, None, 0), rule="token"), crowd())
    assert [o.tokens for o in outcomes] == [o.tokens for o in plain]  # of rule token, too: it is plain sampling


def test_a_cap_bounds_the_depth_of_trees():
    d = SpeculativeDecoder(tunable_pair(0.5, layers=1)[0], PromptLookupDrafter(min_ngram=1), 3, tree=6)
    text = [5, 6, 7, 8] * 3 + [5]
    pairs = zip(crowd(), CAPS, strict=True)
    repeating = [replace(r, prompt=text, report_drafts=True, num_drafts=n) for r, n in pairs]
    outcomes, outputs = run(Scheduler(d, rows=ROWS, max_length=40), repeating)
    for outcome, own, most in zip(outcomes, outputs, CAPS, strict=True):
        depths = outcome.stats.drafted_by_position
        assert len([n for n in depths if n]) == (3 if most is None else most)
        assert any(e.drafts is None for e in own) or most == 0
        assert all(e.drafts in (None, []) for e in own)


@pytest.mark.parametrize(
    ("field", "given", "allowed"),
    (
        ("num_drafts", 4, "None, or 0 to 3"),
        ("num_drafts", -1, "an integer >= 0"),
        ("num_drafts", True, "an integer >= 0"),
        ("report_drafts", 1, "True or False"),
        ("prediction", 7, "a list of token ids"),
        ("prediction", [], "at least one token"),
        ("prediction", [5, 101], "0 to 100"),
        ("prediction", [5] * 33, "up to 32"),
        ("owner", ["me"], "None, or a hashable value"),
    ),
)
def test_fields_are_checked(field, given, allowed):
    with pytest.raises(ValueError, match=f"^{field}: got .*, allowed: {allowed}"):
        scheduler(decoder(PredictedDrafter())).submit(Request([5], 3, **{field: given}))


def test_predictions_need_their_drafter():
    with pytest.raises(ValueError, match="^prediction: got 2 tokens, allowed: None, or a decoder with a Predicted"):
        scheduler().submit(Request([5], 3, prediction=[6, 7]))
    with pytest.raises(ValueError, match="^tree: got 4 with draft=PromptLookupDrafter"):
        decoder(PredictedDrafter(PromptLookupDrafter()), tree=4)
