"""Texts under grammars: with any drafter they are those of plain decoding under the same grammar, and they are what the
grammar says."""

from __future__ import annotations

import asyncio
import functools
import json
import re

import pytest
import torch
from specdec import (
    EarlyExitDrafter,
    Engine,
    FinishReason,
    GrammarSource,
    PromptLookupDrafter,
    Request,
    Scheduler,
    SpeculativeDecoder,
    SuffixDrafter,
    UniversalDrafter,
    load_embedded_head,
)
from specdec.drafters import BatchState, Drafter, Drafts, DraftSession, Step
from specdec.drafters.predicted import PredictedDrafter
from support.grammars import SCHEMAS, tiny_allowed, tiny_grammar
from support.models import generate, toy_model
from support.texts import prompts_of

from specdec_kernels import SamplingParams, Status

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")
nightly = functools.partial(pytest.param, marks=pytest.mark.nightly)


class Hostile(Drafter, DraftSession):
    """Random tokens, ones out of range, none in the middle, ends: whatever no grammar allows."""

    def start(self, batch: BatchState) -> Hostile:
        return self

    def propose(self, step: Step) -> Drafts:
        generator = torch.Generator().manual_seed(step.index)
        tokens = torch.randint(-50, 4200, (len(step.allowed), step.num_drafts), generator=generator)
        return Drafts(torch.where(tokens < -25, -1, torch.where(tokens < 10, 0, tokens)))


DRAFTERS = {
    "model": lambda target, draft, tokenizer: draft,
    "lookup": lambda target, draft, tokenizer: PromptLookupDrafter(),
    "suffix": lambda target, draft, tokenizer: SuffixDrafter(),
    "early_exit": lambda target, draft, tokenizer: EarlyExitDrafter(target, 3),
    "universal": lambda target, draft, tokenizer: UniversalDrafter(draft, tokenizer, tokenizer),
    "eagle3": lambda target, draft, tokenizer: load_embedded_head("eagle3", target),
    "medusa": lambda target, draft, tokenizer: load_embedded_head("medusa", target),
    "predicted": lambda target, draft, tokenizer: PredictedDrafter(SpeculativeDecoder(target, draft).drafter),
    "forced": lambda target, draft, tokenizer: PredictedDrafter(),
    "hostile": lambda target, draft, tokenizer: Hostile(),
}
GRAMMARS = {
    "object": GrammarSource.json_schema(SCHEMAS["object"]),
    "none": None,
    "regex": GrammarSource.regex("(yes|no), [a-z ]{5,30}[.]"),
    "free": None,
    "choice": GrammarSource.choice(["import os", "import sys", "return self"]),
    "json": GrammarSource.json_schema(SCHEMAS["nested"]),
}


@pytest.fixture(scope="module")
def compiler(pair):
    target, _, tokenizer = pair
    return SpeculativeDecoder(target, num_drafts=0).grammar_compiler(tokenizer)


@pytest.fixture(scope="module")
def mixed(pair, compiler):
    """Prompts, of which some have grammars, and their texts when they are decoded plainly, greedy and sampled."""
    prompts = [list(prompt) for prompt in prompts_of(pair[2], len(GRAMMARS))]
    grammars = [source and compiler.compile(source) for source in GRAMMARS.values()]
    texts = {temperature: decode(pair, None, 0, prompts, grammars, temperature).tokens for temperature in (0.0, 0.8)}
    return prompts, grammars, texts


def decode(pair, drafter, num_drafts, prompts, grammars, temperature, **more):
    decoder = SpeculativeDecoder(pair[0], drafter, num_drafts)
    own = {"params": SamplingParams(temperature), "seed": list(range(len(prompts))), "rule": "coupled", **more}
    return decoder.generate(prompts, max_new_tokens=48, grammar=grammars, **own)


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        *((name, 0.0) for name in ("model", "suffix", "hostile", "eagle3")),
        *(("model", 0.8), ("predicted", 0.8)),
        *(nightly(name, t) for name in DRAFTERS for t in (0.0, 0.8)),
    ],
)
def test_texts_are_those_of_plain_decoding(pair, mixed, name, temperature):
    prompts, grammars, texts = mixed
    for num_drafts in (1, 5):
        result = decode(pair, DRAFTERS[name](*pair), num_drafts, prompts, grammars, temperature)
        assert result.drafter_error is None and result.tokens == texts[temperature]


def test_a_text_does_not_depend_on_the_others_of_the_batch(pair, mixed):
    prompts, grammars, texts = mixed
    for i, (prompt, grammar) in enumerate(zip(prompts, grammars, strict=True)):
        alone = decode(pair, pair[1], 4, [prompt], grammar, 0.8, seed=i)
        assert alone.tokens == texts[0.8][i : i + 1]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_scheduler_has_the_same_texts(pair, mixed, ahead):
    """More requests than rows, so that rows get and lose grammars; also where the device would run ahead."""
    prompts, grammars, texts = mixed
    decoder = SpeculativeDecoder(pair[0], pair[1], 3)
    scheduler = Scheduler(decoder, rows=2, max_length=256, rule="coupled", async_scheduling=ahead)
    requests = [
        Request(prompt, 48, SamplingParams(0.8), i, grammar=grammar, id=i)
        for i, (prompt, grammar) in enumerate(zip(prompts, grammars, strict=True))
    ]
    found = {sequence.request.id: sequence.tokens for sequence in scheduler.run(requests)}
    assert [found[i] for i in range(len(prompts))] == texts[0.8]


def test_forced_tokens_are_drafts_that_are_always_accepted(pair, compiler):
    grammar = compiler.compile(GrammarSource.json_schema(SCHEMAS["const"]))
    texts = []
    for drafter, num_drafts in ((None, 0), (PredictedDrafter(), 6)):
        decoder = SpeculativeDecoder(pair[0], drafter, num_drafts)
        result = decoder.generate([[5, 6]], max_new_tokens=48, grammar=grammar)
        texts.append(result.tokens)
    assert texts[0] == texts[1] and result.stats.drafted == result.stats.accepted > 0
    assert result.stats.steps < len(texts[0][0])


def test_texts_are_what_their_grammars_say(pair, mixed):
    _, _, tokenizer = pair
    texts = dict(zip(GRAMMARS, mixed[2][0.8], strict=True))
    told = {name: tokenizer.decode(tokens, skip_special_tokens=True) for name, tokens in texts.items()}
    jsonschema.validate(json.loads(told["object"]), SCHEMAS["object"])
    assert re.fullmatch("(yes|no), [a-z ]{5,30}[.]", told["regex"])
    assert told["choice"] in ("import os", "import sys", "return self")
    assert all(texts[name][-1] == 0 for name in ("object", "regex", "choice"))


@pytest.mark.parametrize("temperature", [0.0, nightly(0.7), 1.0])
def test_json_validates_against_its_schema(pair, compiler, temperature):
    names = list(SCHEMAS)
    prompts = [pair[2](f"# an example of {name}\nexample = ").input_ids for name in names]
    decoder = SpeculativeDecoder(pair[0], pair[1], 4)
    grammars = [compiler.compile(GrammarSource.json_schema(SCHEMAS[name])) for name in names]
    result = decoder.generate(
        prompts,
        max_new_tokens=128,
        params=SamplingParams(temperature),
        seed=list(range(len(names))),
        rule="token",
        grammar=grammars,
    )
    checker, ended = jsonschema.FormatChecker(), 0
    for name, tokens, reason in zip(names, result.tokens, result.finish_reason, strict=True):
        if reason is FinishReason.EOS:
            value = json.loads(pair[2].decode(tokens, skip_special_tokens=True))
            jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=checker).validate(value)
            ended += 1
    assert ended >= len(names) - 1  # one may go on and on: "recursive"


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_log_probs_are_of_the_masked_distribution(rule):
    """And raw ones of the model's own. The toy grammar never allows token 0 first."""
    model, prompt = toy_model(1), [1, 2]
    own = {"rule": rule, "top_log_probs": 2, "output_logits": True, "eos_token_id": 3, "grammar": tiny_grammar()}
    own |= {"max_new_tokens": 4, "params": SamplingParams(1.0), "seed": list(range(8))}
    result = generate(model, toy_model(2), [prompt] * 8, 2, **own)

    for tokens, found, raw, logits in zip(
        result.tokens, result.log_probs, result.raw_log_probs, result.logits, strict=True
    ):
        for i, token in enumerate(tokens):
            allowed = tiny_allowed(tuple(tokens[:i]))
            masked = torch.full((5,), -torch.inf).index_copy(0, torch.tensor(allowed), logits[i][allowed])
            assert found[i] == pytest.approx(float(masked.log_softmax(-1)[token]), abs=1e-4)
            assert raw[i] == pytest.approx(float(logits[i].log_softmax(-1)[token]), abs=1e-4)


# ---- errors ------------------------------------------------------------------------------------------------


def test_what_does_not_go_together_is_refused_by_name(pair, compiler):
    target, draft, tokenizer = pair
    grammar, prompt = compiler.compile(GrammarSource.regex("a+")), [5, 6]
    plain = SpeculativeDecoder(target, draft, 2)
    for decoder, more, told in (
        (plain, {"min_new_tokens": 1}, "^min_new_tokens: got 1 with a grammar"),
        (plain, {"eos_token_id": []}, r"^eos_token_id: got \[\] with a grammar, allowed: ids among which are \[0\]"),
        (plain, {"eos_token_id": 7}, r"^eos_token_id: got \[7\] with a grammar"),
        (plain, {"grammar": "a+"}, "^grammar: got 'a\\+', allowed"),
        (plain, {"grammar": ["a+"]}, "^grammar: got str, allowed: a Grammar"),
        (plain, {"grammar": tiny_grammar()}, "^grammar: got one for a vocabulary of 5 tokens"),
        (SpeculativeDecoder(target, SuffixDrafter(), 2, tree=4), {}, "^grammar: got one with tree=4"),
    ):
        with pytest.raises(ValueError, match=told):
            decoder.generate([prompt], max_new_tokens=4, **{"grammar": grammar, **more})
    with pytest.raises(ValueError, match="^grammar: got one with tree=4"):
        Scheduler(SpeculativeDecoder(target, SuffixDrafter(), 2, tree=4), rows=1, max_length=32).submit(
            Request(prompt, 4, grammar=grammar)
        )


def test_where_bans_leave_no_token_the_text_fails_alone(pair, compiler):
    """The other text goes on."""
    grammar = compiler.compile(GrammarSource.regex("aa"))
    banned = [list(range(1, 4096)), []]
    result = SpeculativeDecoder(*pair[:2], 2).generate(
        [[5, 6], [5, 6]], max_new_tokens=6, grammar=grammar, banned_tokens=banned
    )
    assert result.finish_reason == [FinishReason.FAILED, FinishReason.EOS]
    assert Status.TARGET_EMPTY in result.status[0] and not result.status[1]


def test_an_engine_decodes_grammars_beside_other_texts(pair, mixed):
    prompts, grammars, texts = mixed

    async def main() -> list:
        scheduler = Scheduler(SpeculativeDecoder(pair[0], pair[1], 3), rows=4, max_length=256, rule="coupled")
        async with Engine(scheduler) as engine:
            numbers = [
                await engine.submit(Request(prompt, 48, SamplingParams(0.8), i, grammar=grammar))
                for i, (prompt, grammar) in enumerate(zip(prompts, grammars, strict=True))
            ]
            return [(await engine.result(number)).tokens for number in numbers]

    assert asyncio.run(main()) == texts[0.8]
