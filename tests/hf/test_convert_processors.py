"""transformers' processors in the words of the kernels, or as they are: the distribution is the same."""

from __future__ import annotations

import random

import pytest
import torch
from specdec import SpeculativeDecoder, speculate
from specdec.hf.convert_processors import read_arguments
from support.generates import ENDS, PAD, both, ragged
from support.models import VOCABULARY, tunable_pair
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.generation import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from specdec_kernels import SamplingParams


class SumBan(LogitsProcessor):
    """Bans what depends on every token that is shown, padding and drafts included."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, ids in zip(scores, input_ids, strict=True):
            row[(ids.sum() + 3 * len(ids)) % 5 :: 5] = -torch.inf
        return scores


class RowBias(LogitsProcessor):
    """Looks at the number of the row."""

    def __call__(self, input_ids, scores):
        return scores + torch.arange(len(scores))[:, None] * (torch.arange(scores.shape[1]) % 3)


def test_processors_see_what_transformers_shows_them():
    for processor in (SumBan(), RowBias()):
        theirs, ours = both(logits_processor=LogitsProcessorList([processor]))
        assert torch.equal(theirs, ours) and not torch.equal(theirs, both()[0])


def test_prefix_allowed_tokens_fn_knows_its_row():
    def allowed(row: int, text: torch.Tensor) -> list[int]:
        return list(range(10 * row + 1, 10 * row + 9)) + [int(text[-1])]

    theirs, ours = both(prefix_allowed_tokens_fn=allowed)
    assert torch.equal(theirs, ours)
    assert all(10 * b < t < 10 * b + 9 or t == PAD for b in (1, 2) for t in ours[b, 11:].tolist())


def pool(rng: random.Random, length: int) -> list[LogitsProcessor]:
    """Any of transformers' processors, in any order."""
    some = [rng.randrange(VOCABULARY) for _ in range(12)]
    everything = [
        SequenceBiasLogitsProcessor({(t,): rng.choice([-4.0, 3.0, 8.0]) for t in some}),
        RepetitionPenaltyLogitsProcessor(rng.choice([0.7, 1.5, 2.5])),
        RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=rng.choice([3, length])),
        NoBadWordsLogitsProcessor([[t] for t in some], ENDS),
        NoBadWordsLogitsProcessor([[t, t + 1] for t in range(90)], ENDS),
        MinLengthLogitsProcessor(length + rng.randrange(9), torch.tensor(ENDS)),
        MinNewTokensLengthLogitsProcessor(length - rng.randrange(2), rng.randrange(9), torch.tensor(ENDS)),
        MinLengthLogitsProcessor(length + 5, torch.tensor(ENDS[:4])),  # other ends than those of the text
        SuppressTokensLogitsProcessor([*some, -1]),
        NoRepeatNGramLogitsProcessor(2),
        TemperatureLogitsWarper(rng.choice([0.5, 1.5])),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.8),
        MinPLogitsWarper(0.02),
        TypicalLogitsWarper(0.9),
        SumBan(),
        RowBias(),
    ]
    return rng.sample(everything, rng.randint(1, 4))


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(6, 300))]
)
def test_any_list_of_processors_has_its_distribution(seed, monkeypatch):
    """Greedy texts, and the probability that every sampled token was drawn with; half of the lists begin with what the
    kernels can say, so that both ways and their mixtures are met."""
    generate = SpeculativeDecoder.generate
    monkeypatch.setattr(SpeculativeDecoder, "generate", lambda *args, **kw: generate(*args, log_probs=True, **kw))
    rng, speculator = random.Random(seed), speculate(tunable_pair(0.3)[1], seed=seed)
    processors = pool(rng, 10)
    if seed % 2:
        processors = [p for p in processors if type(p) not in (SumBan, RowBias, TypicalLogitsWarper)] or [SumBan()]
    settings = {"max_new_tokens": 10, "logits_processor": LogitsProcessorList(processors)}
    theirs, ours = both(speculator, **settings)
    assert torch.equal(theirs, ours), processors
    warpers = {
        "temperature": rng.choice([1.0, 0.7, 3.0]),
        "top_k": rng.choice([0, 30]),
        "top_p": rng.choice([1.0, 0.9]),
    }
    shown = {"do_sample": True, "output_scores": True, "return_dict_in_generate": True}
    _, ours = both(speculator, **settings, **warpers, **shown)
    scores = torch.stack(ours.scores).log_softmax(-1)
    for b, (tokens, given) in enumerate(
        zip(speculator.last_result.tokens, speculator.last_result.log_probs, strict=True)
    ):
        expected = [scores[i, b, token].item() for i, token in enumerate(tokens)]
        assert given == pytest.approx(expected, abs=5e-4), processors


def distribution_of(processors: list, do_sample: bool = True, rows: int = 2):
    return read_arguments(processors, [[1, 2, 3, 4]] * rows, do_sample, frozenset(ENDS), 10, VOCABULARY)


@pytest.mark.parametrize(
    ("processors", "params"),
    [
        ([], SamplingParams()),
        ([TemperatureLogitsWarper(0.5), TopKLogitsWarper(5)], SamplingParams(0.5, top_k=5)),
        ([TopPLogitsWarper(0.5), MinPLogitsWarper(0.1)], SamplingParams(1.0, top_p=0.5, min_p=0.1)),
        ([RepetitionPenaltyLogitsProcessor(1.5)], SamplingParams(repetition_penalty=1.5)),
        ([TopKLogitsWarper(3, min_tokens_to_keep=5)], SamplingParams(top_k=5)),
    ],
)
def test_what_the_kernels_can_say(processors, params):
    distribution = distribution_of(processors)
    assert distribution.params == params and distribution.logits_processor is None


def test_biases_bans_and_lengths_in_the_kernels():
    bias = SequenceBiasLogitsProcessor({(5,): 2.0, (6,): float("-inf")})
    penalty = RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=1)
    bans = [NoBadWordsLogitsProcessor([[7], [0]], ENDS), SuppressTokensLogitsProcessor([8, 500, -1])]
    lengths = [MinLengthLogitsProcessor(7, torch.tensor(ENDS)), MinNewTokensLengthLogitsProcessor(3, 99, ENDS)]
    distribution = distribution_of([bias, penalty, *bans, lengths[0], TemperatureLogitsWarper(2.0)])
    assert distribution.logits_processor is None and distribution.params == SamplingParams(2.0, repetition_penalty=1.5)
    assert (
        distribution.logit_bias == {5: 2.0}
        and distribution.banned_tokens == [6, 7, 8]
        and distribution.min_new_tokens == 3
    )
    assert distribution.processor_prompts == [[2, 3, 4]] * 2
    assert distribution_of(lengths).min_new_tokens == 10  # all of them
    assert distribution_of(lengths, do_sample=False).params == SamplingParams(0.0)
    # A division can make two logits one, and then another token is the first of the largest.
    assert distribution_of([TemperatureLogitsWarper(2.0)], do_sample=False).logits_processor is not None


@pytest.mark.parametrize(
    ("processors", "left", "params"),
    [
        # all of what stands before the kernels' temperature, if one of it is not theirs
        ([NoRepeatNGramLogitsProcessor(2), TemperatureLogitsWarper(0.5)], 1, SamplingParams(0.5)),
        ([RepetitionPenaltyLogitsProcessor(1.5), SumBan(), TopKLogitsWarper(5)], 2, SamplingParams(top_k=5)),
        # an order that is not theirs
        ([TopKLogitsWarper(5), TemperatureLogitsWarper(0.5)], 1, SamplingParams(0.5)),
        ([RepetitionPenaltyLogitsProcessor(1.5), SequenceBiasLogitsProcessor({(5,): 2.0})], 2, SamplingParams()),
        ([RepetitionPenaltyLogitsProcessor(1.5)] * 2, 2, SamplingParams()),
        ([SequenceBiasLogitsProcessor({(5,): 2.0})] * 2, 2, SamplingParams()),
        # a warper after them that they lack
        ([TemperatureLogitsWarper(0.5), TopKLogitsWarper(5), TypicalLogitsWarper(0.9)], 3, SamplingParams()),
        # numbers that they do not take
        ([TemperatureLogitsWarper(1e-4)], 1, SamplingParams()),
        ([TopPLogitsWarper(0.5, filter_value=-9.0)], 1, SamplingParams()),
        ([TopPLogitsWarper(0.5, min_tokens_to_keep=2)], 1, SamplingParams()),
        ([RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=9)], 1, SamplingParams()),
        ([SequenceBiasLogitsProcessor({(5, 6): 2.0})], 1, SamplingParams()),
        ([MinLengthLogitsProcessor(7, torch.tensor([5]))], 1, SamplingParams()),
    ],
)
def test_what_runs_as_it_is(processors, left, params):
    distribution = distribution_of(processors)
    assert distribution.params == params and [len(own) for own in distribution.logits_processor] == [left] * 2
    assert (
        distribution.processor_prompts == [[1, 2, 3, 4]] * 2
        and not distribution.banned_tokens
        and distribution.logit_bias is None
    )


def test_a_temperature_that_only_transformers_takes():
    """Below 0.001, where the texts are greedy."""
    _, ours = both(do_sample=True, temperature=1e-5, top_k=0)
    assert torch.equal(ours, both()[0])


def test_processors_with_a_state_are_refused():
    target, draft = tunable_pair(0.3)
    guidance = UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, target)
    with pytest.raises(ValueError, match="^logits_processor: got a UnbatchedClassifierFreeGuidance"):
        target.generate(**ragged(), logits_processor=[guidance], max_new_tokens=3, custom_generate=speculate(draft))
