"""A draft model of which nothing is accepted is said once; texts are right all the same."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from specdec import EarlyExitDrafter, Request, Scheduler, SpeculativeDecoder, SuffixDrafter
from specdec.drafters import Drafter, Drafts, DraftSession
from specdec.drafters.predicted import PredictedDrafter
from specdec.loop.first_drafts import ENOUGH, FirstDrafts
from support.models import tunable_pair

PROMPT = [5, 6, 7]


def of_another_tokenizer(draft):
    """The same model over permuted ids: the right sizes, and nothing else."""
    other, order = copy.deepcopy(draft), torch.arange(draft.config.vocab_size).roll(17)
    with torch.no_grad():
        for part in (other.get_input_embeddings(), other.get_output_embeddings()):
            part.weight.copy_(part.weight[order])
    return other


def said(decoder: SpeculativeDecoder, texts: int) -> list[str]:
    """What is said while so many texts are decoded, one after the other."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for seed in range(texts):
            decoder.generate([[seed, *PROMPT]], max_new_tokens=50, eos_token_id=[])
    return [str(each.message) for each in found if "was accepted" in str(each.message)]


def test_it_is_said_once():
    """After some texts, none of which has drafts enough, and then never again."""
    target, draft = tunable_pair(0.0)
    decoder = SpeculativeDecoder(target, of_another_tokenizer(draft), num_drafts=4)
    assert said(decoder, 1) == []
    (told,) = said(decoder, 3)
    assert told.startswith("none of the first 3") and "(ModelDrafter)" in told and "the target's tokenizer" in told


def test_a_scheduler_says_it_and_goes_on():
    target, draft = tunable_pair(0.0)
    requests = [Request([seed, *PROMPT], 55, eos_token_id=[]) for seed in range(2)]
    drafter = SpeculativeDecoder(target, of_another_tokenizer(draft), num_drafts=3)
    with pytest.warns(RuntimeWarning, match="none of the first"):
        found = [s.tokens for s in Scheduler(drafter, rows=2).run(requests)]
    assert found == [s.tokens for s in Scheduler(SpeculativeDecoder(target, num_drafts=0), rows=2).run(requests)]


def test_nothing_is_said_of_a_right_draft_or_of_copies():
    target, draft = tunable_pair(0.1)
    for drafter in (draft, SuffixDrafter(), EarlyExitDrafter(target, 1)):
        assert said(SpeculativeDecoder(target, drafter, num_drafts=8), 1) == []


def test_one_accepted_draft_is_enough():
    first = FirstDrafts(Doubted())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first.note(ENOUGH - 1, 0)
        first.note(1, 1)
        first.note(2 * ENOUGH, 0)
        FirstDrafts(None).note(ENOUGH, 0)
    late = FirstDrafts(PredictedDrafter(Doubted()))
    late.note(ENOUGH - 1, 0)
    with pytest.warns(RuntimeWarning, match=f"none of the first {ENOUGH} tokens .*Doubted.* Is it plugged in[?]"):
        late.note(1, 0)


class Doubted(Drafter, DraftSession):
    doubt = "Is it plugged in?"

    def start(self, batch):
        return self

    def propose(self, step):
        return Drafts.none(step)
