"""A grammar that fails in the middle of a text ends this text alone, where plain decoding would end it."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import specdec
import torch
from specdec import Engine, FinishReason, GrammarSource, Request, Scheduler, SpeculativeDecoder
from specdec.drafters.predicted import PredictedDrafter
from specdec.hf.grammar_processor import GrammarProcessor
from specdec.sampling.grammar_masks import GrammarError
from support.failing_grammars import (
    OBJECT,
    PanicException,
    fails_after_ab_or_ac,
    fails_in_an_object,
    panic,
    panics,
    with_matcher,
)
from support.grammars import END
from support.models import generate, toy_model

from specdec_kernels import SamplingParams, Status

pytest.importorskip("llguidance")
FILLS = ("fill_next_token_bitmask_par_with_draft_tokens", "fill_next_token_bitmask_par", "fill_next_token_bitmask")


@pytest.fixture(scope="module")
def compiler(pair):
    target, _, tokenizer = pair
    return SpeculativeDecoder(target, num_drafts=0).grammar_compiler(tokenizer)


def outcome(result) -> list[tuple]:
    return list(zip(result.tokens, result.finish_reason, result.errors, result.status, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 4.0])
@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_a_text_fails_where_it_fails_without_drafts(num_drafts, temperature):
    """With the same tokens before, and not where a draft goes that is not taken."""
    target, grammar = toy_model(1), fails_after_ab_or_ac()
    own = {"params": SamplingParams(temperature), "rule": "coupled", "eos_token_id": END, "max_new_tokens": 12}
    own |= {"seed": list(range(60)), "grammar": [grammar, None] * 30}
    plain = outcome(generate(target, None, [[1, 2]] * 60, 0, **own))
    for draft in (target, toy_model(2), PredictedDrafter(None)):
        drafted = generate(target, draft, [[1, 2]] * 60, num_drafts, **own)
        assert drafted.drafter_error is None and outcome(drafted) == plain
    if temperature:
        for tokens, reason, error, status in plain[::2]:
            fails = any(a == 0 and b in (1, 2) for a, b in itertools.pairwise(tokens))
            assert (reason is FinishReason.FAILED) == fails == (error is not None) and status is Status.OK
            assert error is None or error.startswith("GrammarError: grammar: Parser Error: Current row has")
        assert 5 < sum(reason is FinishReason.FAILED for _, reason, _, _ in plain) < 25


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_draft_that_is_not_taken_fails_nothing(rule):
    target, grammar = toy_model(1), fails_after_ab_or_ac()
    own = {"params": SamplingParams(4.0), "rule": rule, "eos_token_id": END, "max_new_tokens": 12}
    result = generate(target, toy_model(3), [[1, 2]] * 200, 4, seed=list(range(200)), grammar=grammar, **own)
    failed = 0
    for tokens, reason, *_ in outcome(result):
        fails = any(a == 0 and b in (1, 2) for a, b in itertools.pairwise(tokens))
        assert (reason is FinishReason.FAILED) == fails
        failed += fails
    assert 20 < failed < 180


def test_the_other_texts_of_a_batch_stay_what_they_were(pair, compiler):
    """In generate, with a scheduler and with an engine, where the failing text has been streamed up to there."""
    target, draft, tokenizer = pair
    failing, fine = (
        fails_in_an_object(compiler.compile(OBJECT), pair[2]),
        compiler.compile(GrammarSource.regex("[0-9]{4}")),
    )
    prompt = tokenizer("x = ").input_ids
    decoder = SpeculativeDecoder(target, draft, 4)
    seeds, params = [1, 2, 3, 4], SamplingParams(0.8)
    own = {"params": params, "seed": seeds, "rule": "coupled", "max_new_tokens": 16, "log_probs": True}
    others = decoder.generate([prompt] * 4, grammar=[None, None, fine, None], **own)
    emitted: list[tuple[int, list[int]]] = []
    result = decoder.generate(
        [prompt] * 4,
        grammar=[failing, None, fine, failing],
        on_emit=lambda output: emitted.append((output.number, output.tokens)),
        **own,
    )
    assert result.tokens[1:3] == others.tokens[1:3] and result.log_probs[1:3] == others.log_probs[1:3]
    assert [error is None for error in result.errors] == [False, True, True, False]
    assert result.finish_reason[0] == result.finish_reason[3] == FinishReason.FAILED
    for row in (0, 3):
        assert tokenizer.decode(result.tokens[row]) == "{" and len(result.log_probs[row]) == 1
        assert sum((tokens for number, tokens in emitted if number == row), []) == result.tokens[row]

    requests = [
        Request(prompt, 16, params, seed, grammar=grammar, id=seed)
        for seed, grammar in zip(seeds, [failing, None, fine, failing], strict=True)
    ]
    scheduler = Scheduler(SpeculativeDecoder(target, draft, 3), rows=2, max_length=64, rule="coupled")
    ended = {sequence.request.id: sequence for sequence in scheduler.run(requests)}
    assert [ended[seed].tokens for seed in seeds] == result.tokens
    assert [ended[seed].error for seed in seeds] == result.errors and isinstance(ended[1].exception, GrammarError)

    async def main() -> list:
        async with Engine(Scheduler(SpeculativeDecoder(target, draft, 3), rows=2, max_length=64, rule="coupled")) as e:
            numbers = [await e.submit(request) for request in requests]
            streams = [[output async for output in e.stream(number)] for number in numbers]
            again = await e.result(await e.submit(requests[1]))
            return [*streams, again]

    *streams, again = asyncio.run(main())
    assert [sum((output.tokens for output in outputs), []) for outputs in streams] == result.tokens
    assert [outputs[-1].finish_reason for outputs in streams] == result.finish_reason
    assert again.tokens == result.tokens[1]  # the engine goes on


@pytest.mark.parametrize(
    ("where", "only"), [(FILLS, None), (FILLS[:2], None), (FILLS[2:], None), *((FILLS[:2], n) for n in (0, 3, 7))]
)
def test_a_panic_of_the_library_ends_its_text_alone(pair, compiler, monkeypatch, where, only):
    """It comes out of a call for all rows. Where the row alone does not panic again, nothing happens to it, either."""
    target, draft, tokenizer = pair
    fine = compiler.compile(GrammarSource.regex("([a-z]{2}[0-9]){3,9}"))
    prompt, seeds = tokenizer("x = ").input_ids, [1, 2, 3]
    own = {"params": SamplingParams(0.8), "seed": seeds, "rule": "coupled", "max_new_tokens": 12}
    decoder = SpeculativeDecoder(target, draft, 3)
    expected = decoder.generate([prompt] * 3, grammar=[fine, fine, None], **own)
    panicking = panics(monkeypatch, fine, *where, only=only)
    result = decoder.generate([prompt] * 3, grammar=[panicking, fine, None], **own)
    assert result.tokens[1:] == expected.tokens[1:]
    if len(where) == 3:
        assert result.errors == [
            "GrammarError: grammar: index out of bounds: the len is 0 but the index is 0",
            None,
            None,
        ]
        assert result.finish_reason[0] is FinishReason.FAILED and result.tokens[0] == []
    else:
        assert result.errors == [None] * 3 and result.tokens == expected.tokens


@pytest.mark.parametrize("made", [True, False])
def test_whatever_else_the_library_raises_ends_its_text_alone(pair, compiler, made):
    """A state that is none; or there is not even one."""
    target, _, tokenizer = pair
    fine = compiler.compile(GrammarSource.regex("[a-z ]{4,30}"))
    broken = with_matcher(fine, object if made else panic)
    decoder, prompt = SpeculativeDecoder(target, PredictedDrafter(None), 3), tokenizer("x = ").input_ids
    own = {"params": SamplingParams(0.8), "rule": "coupled", "max_new_tokens": 8}
    result = decoder.generate([prompt] * 2, grammar=[broken, fine], seed=[1, 2], **own)
    assert result.finish_reason[0] is FinishReason.FAILED and result.errors[0].startswith("GrammarError: grammar: ")
    assert result.tokens[1] == decoder.generate([prompt], grammar=fine, seed=2, **own).tokens[0]


def test_an_interrupt_is_no_failure(pair, compiler, monkeypatch):
    from llguidance import numpy as library

    def interrupted(*arguments):
        raise KeyboardInterrupt

    for name in FILLS:
        monkeypatch.setattr(library, name, interrupted)
    target, draft, tokenizer = pair
    with pytest.raises(KeyboardInterrupt):
        SpeculativeDecoder(target, draft, 3).generate([[5, 6]], grammar=compiler.compile(GrammarSource.regex("a+")))


def test_panics_of_processors_and_stops_end_their_requests_alone(pair):
    """A tokenizer's, say. ``generate`` raises what the caller's own code raised, as it always did."""

    class Stop:
        first_end = panic

    target, draft, tokenizer = pair
    prompt = tokenizer("x = ").input_ids
    plain = SpeculativeDecoder(target, draft, 3).generate([prompt], max_new_tokens=8).tokens[0]
    requests = [
        Request(prompt, 8, id="stop", stop=Stop()),
        Request(prompt, 8, id="processor", logits_processor=[panic]),
        Request(prompt, 8, id="fine"),
    ]
    scheduler = Scheduler(SpeculativeDecoder(target, draft, 3), rows=3, max_length=64)
    ended = {sequence.request.id: sequence for sequence in scheduler.run(requests)}
    assert ended["fine"].tokens == plain
    for name in ("stop", "processor"):
        assert ended[name].finish_reason is FinishReason.FAILED and ended[name].error.startswith(
            "PanicException: index"
        )
    with pytest.raises(PanicException):
        SpeculativeDecoder(target, draft, 3).generate([prompt], stop=Stop())


def test_speculate_warns_of_it(pair, compiler):
    target, draft, tokenizer = pair
    inputs = tokenizer(["x = ", "y = "], return_tensors="pt")
    own = [GrammarProcessor(fails_in_an_object(compiler.compile(OBJECT), pair[2]), inputs.input_ids.shape[1])]
    with pytest.warns(RuntimeWarning, match="grammars failed .*GrammarError: grammar: Parser Error"):
        text = target.generate(
            **inputs, logits_processor=own, max_new_tokens=8, custom_generate=specdec.speculate(draft)
        )
    assert text.shape[1] == inputs.input_ids.shape[1] + 1
    with pytest.raises(GrammarError), torch.inference_mode():
        target.generate(**inputs, logits_processor=own, max_new_tokens=8)
