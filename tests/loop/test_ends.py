"""Ends by text, several texts a prompt, logits, and what processors see: everything agrees on where a text ends."""

from __future__ import annotations

import pytest
import torch
from specdec import FinishReason, Output, Producer, Request, SequenceState, SpeculativeDecoder
from specdec.loop.report import RowReport
from specdec.models.supported import cached_model
from support.models import generate, prompts, tiny_model, tunable_pair
from transformers import RepetitionPenaltyLogitsProcessor

from specdec_kernels import SamplingParams, Status


class After:
    """Ends every text after the first of these tokens; remembers what it was asked."""

    def __init__(self, *tokens: int):
        self.tokens, self.asked = set(tokens), []

    def first_end(self, sequence: int, text: list[int], new: int) -> int | None:
        self.asked.append((sequence, list(text), new))
        return next((i + 1 for i, token in enumerate(text[len(text) - new :]) if token in self.tokens), None)


@pytest.mark.parametrize("num_drafts", [0, 1, 4, 8])
@pytest.mark.parametrize("quality", [0.0, 0.5])
def test_nothing_after_a_stop(num_drafts, quality):
    target, draft = tunable_pair(quality)
    ragged, wanted = prompts(3, 2, 9), {"log_probs": True, "output_logits": True, "max_new_tokens": 40}
    texts = generate(target, None, ragged, 0, **wanted)
    stops = {text[n] for text, n in zip(texts.tokens, (7, 12, 20), strict=True)}
    stop, emitted = After(*stops), [[] for _ in ragged]

    def collect(output: Output) -> None:
        emitted[output.number] += output.tokens

    result = generate(target, draft, ragged, num_drafts, stop=stop, on_emit=collect, **wanted)
    for b, text in enumerate(texts.tokens):
        end = next(i + 1 for i, token in enumerate(text) if token in stops)
        assert result.tokens[b] == emitted[b] == text[:end] and end < 40
        assert result.sequences[b, len(ragged[b]) :].tolist()[:end] == text[:end]
        assert len(result.produced_by[b]) == len(result.log_probs[b]) == len(result.raw_log_probs[b]) == end
        torch.testing.assert_close(result.logits[b], texts.logits[b][:end], rtol=1e-4, atol=1e-3)
        stats = result.sequence_stats[b]
        assert stats.emitted == end == stats.accepted + stats.steps - stats.cut_steps
        assert stats.accepted == sum(p == Producer.ACCEPTED for p in result.produced_by[b]) <= stats.tested
        asked = [(known, new) for sequence, known, new in stop.asked if sequence == b]
        assert [len(known) for known, _ in asked] == [
            len(ragged[b]) + sum(new for _, new in asked[: i + 1]) for i in range(len(asked))
        ]


def test_the_first_of_an_end_of_sequence_and_a_stop_counts():
    target, draft = tunable_pair(0.0)
    prompt = prompts(1, 5, 5)
    text = generate(target, None, prompt, 0, max_new_tokens=30).tokens[0]
    early, late = text.index(text[6]), text.index(text[9])
    assert early < late
    for eos, stop in ((early, late), (late, early)):
        asked = After(text[stop])
        result = generate(target, draft, prompt, 8, max_new_tokens=30, eos_token_id=text[eos], stop=asked)
        assert result.tokens[0] == text[: early + 1]
        assert all(text[eos] not in known[len(prompt[0]) : -1] for _, known, _ in asked.asked)


def test_an_error_of_a_stop_reaches_the_caller():
    class Broken:
        def first_end(self, *_):
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        generate(*tunable_pair(0.3), [[1, 2]], max_new_tokens=4, stop=Broken())


def test_several_texts_of_a_prompt():
    target, draft = tunable_pair(0.3)
    ids = torch.tensor(prompts(2, 6, 6))
    params = SamplingParams(torch.tensor([1.0, 0.0]), repetition_penalty=1.1)
    arguments = {"max_new_tokens": 20, "logit_bias": [{3: 1.0}, {}]}
    result = generate(target, draft, ids, seed=[10, 20], num_return_sequences=3, params=params, **arguments)
    expanded = generate(
        target,
        draft,
        ids.repeat_interleave(3, 0),
        seed=[10, 11, 12, 20, 21, 22],
        params=SamplingParams(torch.tensor([1.0] * 3 + [0.0] * 3), repetition_penalty=1.1),
        max_new_tokens=20,
        logit_bias=[{3: 1.0}] * 3 + [{}] * 3,
    )
    assert result.tokens == expanded.tokens and torch.equal(result.sequences, expanded.sequences)
    assert len({tuple(t) for t in result.tokens[:3]}) == 3 and len({tuple(t) for t in result.tokens[3:]}) == 1
    for bad in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="num_return_sequences: got .*, allowed: an integer >= 1"):
            generate(target, draft, ids, num_return_sequences=bad)


@pytest.mark.parametrize("with_processor", [False, True])
def test_logits_are_those_of_a_full_forward(with_processor):
    """The model's own, whatever penalties and processors made of them."""
    target, draft = tunable_pair(0.3)
    ragged = prompts(2, 3, 8)
    more = {"params": SamplingParams(0.9, presence_penalty=1.0)}
    if with_processor:
        more = {"params": SamplingParams(0.9), "logits_processor": [RepetitionPenaltyLogitsProcessor(1.3)]}
    result = generate(target, draft, ragged, output_logits=True, max_new_tokens=25, seed=[1, 2], **more)
    for prompt, tokens, logits in zip(ragged, result.tokens, result.logits, strict=True):
        full = target(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(logits, full, rtol=1e-4, atol=1e-3)
    nothing = generate(target, draft, ragged, output_logits=True, max_new_tokens=0)
    assert [tuple(t.shape) for t in nothing.logits] == [(0, 101)] * 2
    assert generate(target, draft, ragged, max_new_tokens=3).logits is None


def test_what_processors_and_penalties_see_of_a_prompt():
    """Padding, as transformers shows it to them: here its token may never come."""
    model, prompt = tiny_model(), [5, 9, 5]
    first = generate(model, None, [prompt], 0, max_new_tokens=1).tokens[0][0]
    seen = []

    def never_what_was_seen(ids, scores):
        seen.append(ids[0].tolist())
        return scores.index_fill(1, ids[0], -torch.inf)

    padded = [[first, first, *prompt]]
    result = generate(
        model, model, [prompt], 2, max_new_tokens=6, logits_processor=[never_what_was_seen], processor_prompts=padded
    )
    assert all(ids[:5] == padded[0] for ids in seen) and len(seen[0]) == 5
    assert first not in result.tokens[0] and result.sequences[0, :3].tolist() == prompt
    assert seen[-1][5:] == result.tokens[0][: len(seen[-1]) - 5]
    penalised = SamplingParams(0.0, repetition_penalty=50.0)
    result = generate(model, model, [prompt], 2, max_new_tokens=6, params=penalised, processor_prompts=padded)
    assert first not in result.tokens[0]
    for bad in ([], [[101]], [[-1]]):
        with pytest.raises(ValueError, match="processor_prompts"):
            generate(model, model, [prompt], 2, processor_prompts=bad)


def test_plain_decoding_takes_any_k():
    decoder = SpeculativeDecoder(tiny_model(), None, 0)
    assert decoder.generate([[1, 2]], max_new_tokens=5, eos_token_id=[]).stats.drafted == 0


def sequence(stop: After | None = None) -> SequenceState:
    request = Request([1, 2], max_new_tokens=9, eos_token_id=7, stop=stop)
    return SequenceState.of(0, request, cached_model(tiny_model(), "target"), 2)


def test_a_stop_before_the_end_token_of_the_same_step_is_what_ends_it():
    ended = sequence(After(5))
    ended.take(RowReport([5, 7], 1, 1, 1, 1, 0, None, None), 1)
    assert (ended.finish_reason, ended.tokens) == (FinishReason.STOP, [5])


def test_a_fault_behind_the_end_is_none():
    ended = sequence()
    ended.take(RowReport([5, 7], 2, 2, 2, 2, int(Status.TARGET_NAN), None, None), 1)
    assert (ended.finish_reason, ended.status) == (FinishReason.EOS, Status.OK)
