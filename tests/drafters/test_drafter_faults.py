"""A drafter that fails is dropped, with its error in the log, and no text is lost or changed."""

from __future__ import annotations

import pytest
import torch
from specdec import AdaptiveDrafts, Composite, Request, Scheduler, SpeculativeDecoder
from specdec.drafters import BatchState, Copies, Drafter, Drafts, DraftSession, Step, Votes
from specdec.drafters.predicted import PredictedDrafter
from support.dropped import drops_drafter
from support.models import generate, prompts, tunable_pair

NEW = 40


class Failing(Drafter, DraftSession):
    """Proposes token 1; from its ``call``-th draft on, ``fault`` happens."""

    def __init__(self, fault, call: int = 3, start=None, end=None):
        self.fault, self.call, self.on_start, self.on_end, self.calls = fault, call, start, end, 0

    def start(self, batch: BatchState) -> Failing:
        if self.on_start is not None:
            raise self.on_start
        return self

    def propose(self, step: Step) -> Drafts:
        self.calls += 1
        good = Drafts(torch.ones_like(step.last_two[:, :1]).expand(-1, step.num_drafts))
        if self.calls < self.call:
            return good
        if isinstance(self.fault, Exception):
            raise self.fault
        return self.fault(good)

    def end(self, row: int, output: list[int]) -> None:
        if self.on_end is not None:
            raise self.on_end


FAULTS = {
    "raises": RuntimeError("no luck"),
    "out_of_memory": torch.OutOfMemoryError("CUDA out of memory"),
    "nothing": lambda good: None,
    "too_many": lambda good: Drafts(good.tokens.repeat(1, 3)),
    "too_few_sequences": lambda good: Drafts(good.tokens[:1]),
    "floats": lambda good: Drafts(good.tokens.float()),
    "one_row": lambda good: Drafts(good.tokens[0]),
    "logits_of_fewer": lambda good: Drafts(good.tokens, torch.zeros(*good.tokens[:, 1:].shape, 101)),
    "stats_of_fewer": lambda good: Drafts(
        good.tokens, torch.zeros(*good.tokens.shape, 101), (good.tokens[:, 1:].float(),) * 2
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("call", [1, 3])
def test_a_drafter_that_fails_is_dropped(fault, call):
    target, ragged = tunable_pair(0.3)[0], prompts(3, 2, 9)
    drafter = Failing(FAULTS[fault], call)
    with drops_drafter("the drafter failed and is dropped, decoding goes on: "):
        result = generate(target, drafter, ragged, 4, max_new_tokens=NEW)
    assert drafter.calls == call and result.drafter_error
    assert result.tokens == generate(target, None, ragged, 0, max_new_tokens=NEW).tokens
    assert set(result.status) == {0}
    assert result.stats.drafted <= 3 * 4 * (call - 1)


COPIES = {
    "fewer rows": Copies([[1, 2]], [3]),
    "fewer matches": Copies([[1, 2], [3], []], [3, 3]),
    "no numbers": Copies([[1, 2], [3], []], [3, 2.5, 0]),
    "numbers below 0": Copies([[1, 2], [3], []], [3, -1, 0]),
    "no tokens": Copies([[1, 2], ["x"], []], [3, 3, 0]),
    "no lists": Copies([1, 2, 3], [3, 3, 0]),
    "nothing": Copies([None, None, None], [0, 0, 0]),
    "nothing beside something": Copies([None, [1, 2], []], [0, 0, 0]),
    "fewer votes": Copies([[1, 2], [3], []], [3, 3, 0], [Votes.ONCE, Votes.FEW]),
    "no votes": Copies([[1, 2], [3], []], [3, 3, 0], [Votes.ONCE, 9, Votes.FEW]),
}


class Copier(Drafter, DraftSession):
    copying = True

    def __init__(self, find):
        self.find = find

    def start(self, batch: BatchState) -> Copier:
        return self

    def propose(self, step: Step) -> Copies:
        return self.find(step.texts)


@pytest.mark.parametrize("fault", COPIES)
@pytest.mark.parametrize("num_drafts", [4, AdaptiveDrafts(4), AdaptiveDrafts(4, costs=[1.0] * 5)])
def test_a_drafter_that_copies_what_cannot_be_learned_from_is_dropped(fault, num_drafts):
    target, ragged = tunable_pair(0.3)[0], prompts(3, 2, 9)

    with drops_drafter("the drafter failed and is dropped, decoding goes on: "):
        result = generate(target, Copier(lambda texts: COPIES[fault]), ragged, num_drafts, max_new_tokens=NEW)
    assert result.drafter_error and set(result.status) == {0} and result.stats.drafted == 0
    assert result.tokens == generate(target, None, ragged, 0, max_new_tokens=NEW).tokens


def test_copied_tokens_outside_the_vocabulary_end_their_row_alone():
    """And more tokens than a row may draft are left out."""
    target, ragged = tunable_pair(0.3)[0], prompts(3, 2, 9)
    plain = generate(target, None, ragged, 0, max_new_tokens=NEW)

    def find(texts: list[list[int]]) -> Copies:
        wholes = map(list.__add__, ragged, plain.tokens)
        first, _, third = (whole[len(text) :] for whole, text in zip(wholes, texts, strict=True))
        return Copies([[*first[:1], 10**6], [-5], third], [9, 9, 9])

    result = generate(target, Copier(find), ragged, 4, max_new_tokens=NEW)
    assert result.drafter_error is None and result.tokens == plain.tokens
    assert [stats.accepted for stats in result.sequence_stats] == [NEW // 2, 0, NEW * 4 // 5]
    assert [stats.drafted for stats in result.sequence_stats] == [NEW // 2, 0, NEW * 4 // 5]


@pytest.mark.parametrize(("most", "drafted"), [(8, 8 * 4 + 2), (2, 2 * 13)])  # of 40 tokens; widths are 0, 2, 4, 8
def test_copies_of_more_tokens_than_a_row_may_draft_are_cut(most, drafted):
    """Near the end of a text, or because its request says so."""
    target, ragged = tunable_pair(0.3)[0], prompts(3, 2, 9)
    plain = generate(target, None, ragged, 0, max_new_tokens=NEW)

    def find(texts: list[list[int]]) -> Copies:
        wholes = [whole + [7] * 9 for whole in map(list.__add__, ragged, plain.tokens)]
        after = [whole[len(text) :] for whole, text in zip(wholes, texts, strict=False)]
        return Copies(after, [20] * len(after))

    decoder = SpeculativeDecoder(target, Copier(find), AdaptiveDrafts(8, costs=[1.0] * 9))
    requests = [Request(p, NEW, num_drafts=most) for p in ragged]
    results = list(Scheduler(decoder, rows=3, max_length=60).run(requests))
    assert [r.tokens for r in results] == plain.tokens and [r.error for r in results] == [None] * 3
    assert {r.stats.drafted for r in results} == {drafted}


@pytest.mark.parametrize("fault", [*sorted(COPIES.keys() - {"no tokens"}), "Drafts"])
def test_a_composite_is_dropped_whose_copies_cannot_be_learned_from(fault):
    target, draft = tunable_pair(0.3)
    ragged = prompts(3, 2, 9)
    wrong = COPIES.get(fault, Drafts(torch.ones(3, 1, dtype=torch.int64)))
    with drops_drafter("the drafter failed and is dropped, decoding goes on: "):
        result = generate(
            target, Composite([Copier(lambda texts: wrong), draft]), ragged, AdaptiveDrafts(4), max_new_tokens=NEW
        )
    assert result.drafter_error and set(result.status) == {0}
    assert result.tokens == generate(target, None, ragged, 0, max_new_tokens=NEW).tokens


def test_a_drafter_beside_predictions_that_proposes_nothing_is_dropped():
    target, ragged = tunable_pair(0.3)[0], prompts(3, 2, 9)
    with drops_drafter("TypeError: propose.. returned NoneType, allowed: Drafts or Copies"):
        result = generate(target, PredictedDrafter(Failing(FAULTS["nothing"], 1)), ragged, 4, max_new_tokens=NEW)
    assert result.tokens == generate(target, None, ragged, 0, max_new_tokens=NEW).tokens


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_drafter_that_cannot_start(adaptive):
    target, ragged = tunable_pair(0.3)[0], prompts(2, 2, 9)
    drafter = Failing(None, start=OSError("no file"))
    with drops_drafter("OSError: no file"):
        result = generate(target, drafter, ragged, AdaptiveDrafts() if adaptive else 4, max_new_tokens=NEW)
    assert result.drafter_error == "OSError: no file" and drafter.calls == 0
    assert result.tokens == generate(target, None, ragged, 0, max_new_tokens=NEW).tokens


def test_a_drafter_that_starts_no_session():
    class Forgets(Drafter):
        def start(self, batch):
            Failing(None)  # and no return

    target, ragged = tunable_pair(0.3)[0], prompts(2, 2, 9)
    with drops_drafter("TypeError: start.. returned NoneType, allowed: DraftSession"):
        result = generate(target, Forgets(), ragged, 4, max_new_tokens=NEW)
    assert result.drafter_error == "TypeError: start() returned NoneType, allowed: DraftSession"
    assert result.tokens == generate(target, None, ragged, 0, max_new_tokens=NEW).tokens


@pytest.mark.parametrize(("kind", "method"), [(Drafter, "start"), (DraftSession, "propose")])
def test_a_method_that_was_not_written_is_named_before_anything_is_decoded(kind, method):
    unfinished = type("Unfinished", (kind,), {"__doc__": "Has no method."})
    with pytest.raises(TypeError, match=f"abstract class Unfinished .*{method}"):
        unfinished()
    type("Whole", (unfinished,), {method: lambda self, _: None})()


def test_what_is_no_drafter_is_told_of_what_is_one():
    class Similar:
        def start(self, batch):
            return Failing(None)

    target = tunable_pair(0.3)[0]
    with pytest.raises(ValueError, match="^draft: got Similar, allowed: .* or a specdec.drafters.Drafter such as"):
        SpeculativeDecoder(target, Similar())
    with pytest.raises(ValueError, match=r"^draft: got the class Failing, allowed: .* Failing\(...\) makes"):
        SpeculativeDecoder(target, Failing)


def test_a_drafter_that_fails_while_it_is_measured():
    target, ragged = tunable_pair(0.3)[0], prompts(2, 2, 9)
    with drops_drafter("no luck"):
        result = generate(target, Failing(FAULTS["raises"], 1), ragged, AdaptiveDrafts(), max_new_tokens=NEW)
    assert result.tokens == generate(target, None, ragged, 0, max_new_tokens=NEW).tokens


def test_a_drafter_that_fails_at_the_end_costs_nothing():
    target, ragged = tunable_pair(0.3)[0], prompts(2, 2, 9)
    with drops_drafter("disk full"):
        result = generate(target, Failing(None, 999, end=OSError("disk full")), ragged, 2, max_new_tokens=9)
    assert result.tokens == generate(target, None, ragged, 0, max_new_tokens=9).tokens


def test_fewer_columns_than_asked_for():
    """A drafter with less to say makes a cheaper verification; all its drafts are verified."""
    target, ragged = tunable_pair(0.3)[0], prompts(3, 2, 9)
    texts, widths = generate(target, None, ragged, 0, max_new_tokens=NEW).tokens, []

    class Knows(Failing):
        def propose(self, step: Step) -> Drafts:
            width = len(widths) % (step.num_drafts + 1)
            widths.append(width)
            starts = [len(text) - len(prompt) for text, prompt in zip(step.texts, ragged, strict=True)]
            rows = [([*text, *[0] * 9])[n : n + width] for text, n in zip(texts, starts, strict=True)]
            return Drafts(torch.tensor(rows, dtype=torch.int64).view(3, width))

    result = generate(target, Knows(None), ragged, 4, max_new_tokens=NEW)
    assert result.drafter_error is None
    assert result.tokens == texts and set(widths) == {0, 1, 2, 3, 4}
    assert result.stats.alpha == 1.0 and result.stats.drafted == 3 * sum(widths)
