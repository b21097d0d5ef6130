"""``custom_generate=specdec.speculate(...)`` against transformers' own ``generate``."""

from __future__ import annotations

import inspect

import pytest
import torch
from specdec import PromptLookupDrafter, SpeculativeDecoder, speculate
from specdec.hf.assistance import DEFAULTS as ASSISTANCE
from support.generates import both, ragged
from support.models import tiny_model, tunable_pair
from transformers import (
    LogitsProcessor,
)
from transformers.generation import (
    MaxLengthCriteria,
)

from specdec_kernels import SamplingParams

# ---- the same text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ("token", "block", "coupled"))
@pytest.mark.parametrize("paddings", ((0,), (0, 0), (0, 4, 8), (9, 2, 5, 0, 7)))
def test_greedy_batches_have_the_text_of_transformers(paddings, rule):
    speculator = speculate(tunable_pair(0.3)[1], num_drafts=5, rule=rule)
    theirs, ours = both(speculator, ragged(paddings))
    assert ours.dtype == theirs.dtype and torch.equal(theirs, ours)
    assert speculator.last_result.stats.accepted > 0


def test_the_embedded_pair_with_stop_strings_as_transformers_finds_them(pair):
    target, draft, tokenizer = pair
    texts = ["def read(self", "import os\nimport", "class A:\n    def __init__(self, x", "for i in range("]
    inputs = dict(tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False))
    for strings in (["):\n", "self.x"], [" the", " return"]):
        theirs = target.generate(**inputs, max_new_tokens=24, stop_strings=strings, tokenizer=tokenizer)
        speculator = speculate(draft, stop_strings=strings, tokenizer=tokenizer)
        ours = target.generate(**inputs, max_new_tokens=24, custom_generate=speculator)
        assert torch.equal(theirs, ours)
        speculator = speculate(draft, tokenizer=tokenizer)  # the strings may be given to generate as well
        ours = target.generate(**inputs, max_new_tokens=24, stop_strings=strings, custom_generate=speculator)
        assert torch.equal(theirs, ours)
        assert any(len(tokens) < 24 for tokens in speculator.last_result.tokens)


def test_plain_decoding_and_an_unpadded_prompt_without_a_mask():
    theirs, ours = both(speculate(), {"input_ids": ragged((0,))["input_ids"]}, eos_token_id=None)
    assert torch.equal(theirs, ours) and ours.shape[1] == 30


def test_trees_of_prompt_lookup():
    theirs, ours = both(
        speculator := speculate(drafter=PromptLookupDrafter(min_ngram=1), num_drafts=4, tree=9),
        ragged((0, 4)),
        eos_token_id=None,
        max_new_tokens=40,
        bad_words_ids=[[i] for i in range(6, 101)],
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert torch.equal(theirs.sequences, ours.sequences) and speculator.last_result.stats.accepted > 5
    stats = speculator.last_result.stats
    assert stats.nodes > stats.drafted
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), rtol=0, atol=1e-3)


def test_a_draft_with_a_tokenizer_of_its_own(pair):
    target, draft, tokenizer = pair
    inputs = {"input_ids": torch.tensor([tokenizer("def read(self):").input_ids])}
    speculator = speculate(draft, tokenizer=tokenizer, draft_tokenizer=tokenizer, num_drafts=3)
    ours = target.generate(**inputs, max_new_tokens=16, custom_generate=speculator)
    assert torch.equal(ours, target.generate(**inputs, max_new_tokens=16))
    assert speculator.last_result.stats.accepted > 0


def test_position_ids_of_the_mask_are_taken():
    inputs = ragged()
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    assert torch.equal(*both(inputs={**inputs, "position_ids": positions}))


# ---- ends ---------------------------------------------------------------------------------------------------


def test_stopping_criteria_end_their_own_rows():
    def ends_on_a_multiple_of_its_row(ids, scores):
        rows = torch.arange(len(ids)) + 3
        return (ids[:, -1] % rows == 0) & (ids.shape[1] > 12)

    theirs, ours = both(stopping_criteria=[ends_on_a_multiple_of_its_row])
    assert torch.equal(theirs, ours) and not torch.equal(ours, both()[0])


def test_stop_strings_beside_criteria(pair):
    """Either ends a row: whichever is first."""
    target, draft, tokenizer = pair
    inputs = {"input_ids": torch.tensor([tokenizer("for i in range(").input_ids])}
    longest = inputs["input_ids"].shape[1] + 9
    settings = {"max_new_tokens": 16, "stopping_criteria": [lambda ids, scores: ids.shape[1] >= longest]}
    ends = set()
    text = target.generate(**inputs, max_new_tokens=5)[0, -3:]
    for strings in (tokenizer.decode(text), "zzzz"):
        theirs = target.generate(**inputs, **settings, stop_strings=strings, tokenizer=tokenizer)
        speculator = speculate(draft, stop_strings=strings, tokenizer=tokenizer)
        ours = target.generate(**inputs, **settings, custom_generate=speculator)
        assert torch.equal(theirs, ours)
        ends.add(ours.shape[1])
    assert max(ends) == longest and len(ends) == 2


def test_a_length_of_ones_own():
    for length in (3, 10, 14):  # shorter than the prompt, too: one token comes, as in transformers
        theirs, ours = both(stopping_criteria=[MaxLengthCriteria(length)])
        assert torch.equal(theirs, ours) and ours.shape[1] == max(length, 11)


# ---- seeds --------------------------------------------------------------------------------------------------


def sample(speculator, **settings) -> list[list[int]]:
    settings = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 8, **settings}
    both_rows = ragged((0, 3))
    tunable_pair(0.3)[0].generate(**both_rows, **settings, custom_generate=speculator)
    return speculator.last_result.tokens


def test_torchs_generator_decides_where_no_seed_was_given():
    draft = tunable_pair(0.3)[1]
    torch.manual_seed(5)
    first, second = sample(speculate(draft)), sample(speculate(draft))
    torch.manual_seed(5)
    assert first == sample(speculate(draft)) and first != second
    state = torch.get_rng_state()
    sample(speculate(draft), do_sample=False, temperature=1.0)
    assert torch.equal(state, torch.get_rng_state())  # greedy texts need none


def test_seeds_count_up_over_the_texts_of_a_prompt():
    target, draft = tunable_pair(0.3)
    texts = sample(speculate(draft, seed=7), num_return_sequences=3, top_k=0)
    decoder, inputs = SpeculativeDecoder(target, draft), ragged((0, 3))
    params = SamplingParams(2.0)
    expected = decoder.generate(**inputs, max_new_tokens=8, params=params, seed=7, num_return_sequences=3)
    assert texts == expected.tokens and len({*map(tuple, texts)}) == 6
    assert sample(speculate(draft, seed=[7, 8, 9, 7, 8, 9]), num_return_sequences=3, top_k=0) == texts
    with pytest.raises(ValueError, match="^seed: got"):
        sample(speculate(draft, seed=[1, 2, 3]))


# ---- the callable -------------------------------------------------------------------------------------------


def test_a_second_call_sets_nothing_up_again(monkeypatch):
    made, build = [], SpeculativeDecoder.__init__
    monkeypatch.setattr(SpeculativeDecoder, "__init__", lambda self, *a, **k: made.append(a) or build(self, *a, **k))
    target, draft = tunable_pair(0.3)
    speculator = speculate(draft)
    for _ in range(2):
        target.generate(**ragged(), max_new_tokens=3, custom_generate=speculator)
    assert len(made) == 1
    other = tiny_model("llama")
    assert torch.equal(
        *(other.generate(**ragged(), max_new_tokens=3, **c) for c in ({}, {"custom_generate": speculator}))
    )
    assert len(made) == 2  # another model
    other.generate(**ragged(), max_new_tokens=3, num_assistant_tokens=2, custom_generate=speculator)
    assert len(made) == 3  # another K
    try:
        with pytest.raises(ValueError, match="target: is in training mode"):
            target.train().generate(**ragged(), max_new_tokens=3, custom_generate=speculator)
    finally:
        target.eval()


def test_it_looks_like_any_function():
    speculator = speculate(tunable_pair(0.3)[1])
    prepared = ["model", "input_ids", "logits_processor", "stopping_criteria", "generation_config"]
    given = ["stop_strings", "token_healing", *ASSISTANCE]
    assert [*inspect.signature(speculator).parameters] == [*prepared, *given, "model_kwargs"]
    assert speculator.last_result is None


@pytest.mark.filterwarnings("error")
def test_logits_without_a_distribution_end_with_a_warning():
    class Breaks(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores * float("nan") if input_ids.shape[1] > 12 else scores

    with pytest.raises(RuntimeWarning, match=r"sequences ended where .* \(0: TARGET_NAN, 1: TARGET_NAN"):
        both(speculate(), eos_token_id=None, logits_processor=[Breaks()])
