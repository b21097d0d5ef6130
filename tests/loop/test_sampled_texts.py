"""The sampling distribution in the loop: parameters, rules, biases and processors, against transformers and exact
distributions."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from specdec import AdaptiveDrafts
from specdec.drafters import BatchState, Drafter, Drafts, DraftSession, Step
from specdec.evaluation.verify.chi_square import chi_square
from specdec.loop.step_planner import StepPlanner
from specdec.sampling.grammar_masks import GrammarMasks
from support.captured import on_gpu
from support.grammars import END as TEXT_END
from support.grammars import tiny_allowed, tiny_grammar
from support.models import GeneratedPenalties, generate, prompts, pruned_draft, tiny_model, toy_model, tunable_pair
from transformers import LogitsProcessorList
from transformers.generation import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specdec_kernels import SamplingParams
from specdec_kernels.testing import text_distribution, total_variation

RULES = ("token", "block", "coupled")
nightly = functools.partial(pytest.param, marks=pytest.mark.nightly)


# ---- greedy text is transformers' --------------------------------------------------------------------------

END = 71  # ends the tiny target's texts, where nothing keeps it from coming


@pytest.mark.parametrize(
    "ours, theirs",
    [
        nightly({"params": {"repetition_penalty": 1.3}}, {"repetition_penalty": 1.3}),
        nightly({"params": {"repetition_penalty": 0.8}}, {"repetition_penalty": 0.8}),
        nightly({"min_new_tokens": 9}, {"min_new_tokens": 9}),
        nightly({"logit_bias": {5: 4.0, 60: -3.5}}, {"sequence_bias": {(5,): 4.0, (60,): -3.5}}),
        nightly({"banned_tokens": [3, 50, 90]}, {"bad_words_ids": [[3], [50], [90]]}),
        nightly(
            {"params": {"presence_penalty": 1.5, "frequency_penalty": 0.7}},
            {"logits_processor": lambda n: GeneratedPenalties(n, 1.5, 0.7)},
        ),
        (
            {"logits_processor": [NoRepeatNGramLogitsProcessor(2)], "params": {"repetition_penalty": 1.2}},
            {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
        ),
        (
            {
                "params": {"repetition_penalty": 1.3},
                "min_new_tokens": 20,
                "logit_bias": {5: 4.0},
                "banned_tokens": [90],
            },
            {
                "repetition_penalty": 1.3,
                "min_new_tokens": 20,
                "sequence_bias": {(5,): 4.0},
                "bad_words_ids": [[90]],
            },
        ),
    ],
)
def test_greedy_text_equals_transformers(ours, theirs):
    target, draft = tunable_pair(0.3)
    ragged, plain = prompts(4, 1, 20, seed=3), []
    ours = {**ours, "params": SamplingParams(0.0, **ours.get("params", {}))}
    for prompt in ragged:
        options = dict(theirs)
        if "logits_processor" in options:
            options["logits_processor"] = LogitsProcessorList([options["logits_processor"](len(prompt))])
        ids = torch.tensor([prompt])
        whole = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=40,
            eos_token_id=END,
            pad_token_id=0,
            **options,
        )
        plain.append(whole[0, len(prompt) :].tolist())
    for num_drafts, rule in ((0, "token"), (7, "token"), (4, "block"), (4, "coupled")):
        result = generate(target, draft, ragged, num_drafts, max_new_tokens=40, eos_token_id=END, rule=rule, **ours)
        assert result.tokens == plain
    free = generate(target, None, ragged, 0, max_new_tokens=40, eos_token_id=END)
    assert free.tokens != plain  # the setting does something here


def test_filters_have_no_say_in_greedy_text():
    target, draft = tunable_pair(0.3)
    ragged = prompts(3, 2, 9)
    params = SamplingParams(0.0, top_k=3, top_p=0.5, min_p=0.2)
    free = generate(target, draft, ragged, max_new_tokens=20)
    assert generate(target, draft, ragged, max_new_tokens=20, params=params).tokens == free.tokens


# ---- coupled: the text of plain sampling, token for token --------------------------------------------------


class LastAgain(Drafter, DraftSession):
    """One-hot drafts: the last token, again and again."""

    def start(self, batch: BatchState):
        return self

    def propose(self, step: Step) -> Drafts:
        return Drafts(step.last_two[:, 1:].expand(-1, step.num_drafts))


DRAFTERS = {
    "good": lambda: tunable_pair(0.3)[1],
    "adversarial": lambda: tiny_model("llama", seed=99),
    "one-hot": LastAgain,
}
FILTERS = {"top_k": 20, "top_p": 0.95, "min_p": 0.01}


@functools.cache
def plain_texts(filtered: bool) -> list[list[int]]:
    target, params = tunable_pair(0.3)[0], SamplingParams(0.9, **(FILTERS if filtered else {}))
    ragged = prompts(16, 1, 25, seed=6)
    return [
        generate(target, None, [p], 0, max_new_tokens=24, params=params, seed=b, rule="coupled").tokens[0]
        for b, p in enumerate(ragged)
    ]


@pytest.mark.parametrize(
    ("name", "filtered"),
    [nightly("good", False), ("good", True), nightly("adversarial", True), nightly("one-hot", False)],
)
def test_coupled_text_is_that_of_plain_sampling(name, filtered):
    target, drafter = tunable_pair(0.3)[0], DRAFTERS[name]()
    params, ragged = SamplingParams(0.9, **(FILTERS if filtered else {})), prompts(16, 1, 25, seed=6)
    expected = plain_texts(filtered)
    alphas = []
    for num_drafts in (0, 1, 5):
        batch = generate(
            target, drafter, ragged, num_drafts, max_new_tokens=24, params=params, seed=list(range(16)), rule="coupled"
        )
        assert batch.tokens == expected
        if num_drafts == 5:
            alone = generate(
                target, drafter, ragged[5:6], num_drafts, max_new_tokens=24, params=params, seed=5, rule="coupled"
            )
            assert alone.tokens == expected[5:6]
        alphas.append(batch.stats.alpha)
    assert alphas[0] == 0.0 and (min(alphas[1:]) > 0.4) == (name == "good")


def test_coupled_text_is_that_of_plain_sampling_under_every_setting():
    target, draft = tunable_pair(0.3)
    ragged = prompts(4, 1, 12, seed=2)
    settings = {
        "params": SamplingParams(0.9, **FILTERS, repetition_penalty=1.2, frequency_penalty=0.4),
        "logit_bias": {4: 2.0},
        "banned_tokens": [9],
        "min_new_tokens": 12,
        "eos_token_id": [1, 2, 3],
        "logits_processor": [TypicalLogitsWarper(0.9)],
    }
    texts = [
        generate(target, draft, ragged, k, max_new_tokens=30, seed=[7, 8, 9, 10], rule="coupled", **settings).tokens
        for k in (0, 1, 3, 6)
    ]
    assert all(t == texts[0] for t in texts[1:]) and any(len(t) > 12 for t in texts[0])


# ---- sampled text has the distribution ------------------------------------------------------------------------------

PROMPT = (1, 2)
DISTRIBUTIONS = {  # name -> (what generate gets, transformers' processors with the same meaning)
    "plain": ({}, lambda: []),
    "filters": (
        {"params": {"top_k": 4, "top_p": 0.9, "min_p": 0.1}},
        lambda: [TopKLogitsWarper(4), TopPLogitsWarper(0.9), MinPLogitsWarper(0.1)],
    ),
    "penalties": (
        {
            "params": {"repetition_penalty": 1.8, "presence_penalty": 0.8, "frequency_penalty": 0.5},
            "logit_bias": {0: 0.9, 3: -0.5},
        },
        lambda: [
            SequenceBiasLogitsProcessor({(0,): 0.9, (3,): -0.5}),
            RepetitionPenaltyLogitsProcessor(1.8),
            GeneratedPenalties(len(PROMPT), 0.8, 0.5),
        ],
    ),
    "ends": (
        {"min_new_tokens": 2, "eos_token_id": 3},
        lambda: [MinNewTokensLengthLogitsProcessor(len(PROMPT), 2, 3, device="cpu")],
    ),
    "no_repeat": ({"logits_processor": [NoRepeatNGramLogitsProcessor(1)]}, lambda: [NoRepeatNGramLogitsProcessor(1)]),
    "prefix": (
        {"logits_processor": [PrefixConstrainedLogitsProcessor(lambda _, ids: [0, 2, int(ids[-1])], 1)]},
        lambda: [PrefixConstrainedLogitsProcessor(lambda _, ids: [0, 2, int(ids[-1])], 1)],
    ),
    "grammar": (
        {"grammar": tiny_grammar, "eos_token_id": TEXT_END, "params": {"top_k": 3}},
        lambda: [
            PrefixConstrainedLogitsProcessor(lambda _, ids: tiny_allowed((*ids[len(PROMPT) :].tolist(),)), 1),
            TopKLogitsWarper(3),
        ],
    ),
    "typical": ({"logits_processor": [TypicalLogitsWarper(0.7)]}, lambda: [TypicalLogitsWarper(0.7)]),
    "d2t": ({"d2t": [1, 2, 4], "params": {"min_p": 0.05}}, lambda: [MinPLogitsWarper(0.05)]),
}


def distribution_of(model, processors, end: int | None, temperature: float = 1.2):
    """Exact distribution of three tokens after PROMPT; what follows an end of sequence is written as that token
    again."""
    warpers = [p for p in processors if isinstance(p, (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper))]
    rest = [p for p in processors if p not in warpers]
    chain = LogitsProcessorList([*rest, TemperatureLogitsWarper(temperature), *warpers])

    @functools.cache
    def next_token(text: tuple[int, ...]) -> np.ndarray:
        if end is not None and end in text[len(PROMPT) :]:
            return np.eye(5)[end]
        ids = torch.tensor([text])
        with torch.inference_mode():
            return chain(ids, model(ids).logits[:, -1])[0].double().softmax(-1).numpy()

    return text_distribution(next_token, 3, PROMPT)


# What the loop makes of a setting does not depend on the rule.
EVERY_DAY = {
    "plain": "token",
    "filters": "block",
    "penalties": "token",
    "ends": "coupled",
    "no_repeat": "block",
    "d2t": "block",
    "grammar": "block",
}


@pytest.mark.parametrize(
    "name, rule, count",
    [
        *((name, rule, 4_000) for name, rule in EVERY_DAY.items()),
        *(nightly(name, rule, 12_000) for name, rule in itertools.product(DISTRIBUTIONS, RULES)),
    ],
)
def test_sampled_text_has_the_distribution(name, rule, count):
    check_distribution(name, rule, count)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_only_the_first_draft_is_drawn_under_a_grammar(device, monkeypatch):
    """On a GPU the host would have to wait for the drafts before the others."""
    if device == "cpu":
        monkeypatch.setattr(GrammarMasks, "while_drafting", lambda self, index: bool(self) and index == 0)
    check_distribution("grammar", "block", 4_000, device)


def check_distribution(name: str, rule: str, count: int, device: str = "cpu") -> None:
    """Three tokens of a vocabulary of five under a draft that is often wrong, with two drafts a step."""
    settings, processors = DISTRIBUTIONS[name]
    # A grammar is made here, as its library may be missing, and other settings need none.
    settings = {key: value() if key == "grammar" else value for key, value in settings.items()}
    end = settings.get("eos_token_id")
    if "logits_processor" in settings:
        count //= 2
    target, draft, d2t = toy_model(1), toy_model(2), settings.pop("d2t", None)
    if d2t is not None:
        draft = pruned_draft(draft, torch.tensor(d2t))
    params = SamplingParams(1.2, **settings.pop("params", {}))
    result = generate(
        copy.deepcopy(target).to(device),
        copy.deepcopy(draft).to(device),
        [list(PROMPT)] * count,
        2,
        d2t=d2t,
        max_new_tokens=3,
        params=params,
        seed=list(range(count)),
        rule=rule,
        **settings,
    )
    assert 0.1 < result.stats.alpha < 0.95
    counts = Counter((*t, *[end] * (3 - len(t))) for t in map(tuple, result.tokens))
    distribution = distribution_of(target, processors(), end)
    found = chi_square(counts, distribution, level=1e-4)
    assert found.p_value > 1e-4 and found.detectable < 15 / count**0.5, found
    if name not in ("plain", "d2t"):  # these do not change much of the target's distribution
        assert total_variation(distribution, distribution_of(target, [], end)) > 0.04


@pytest.mark.parametrize("rule", ["token", *map(nightly, RULES[1:])])
def test_k_may_depend_on_the_past_of_the_whole_batch(rule, monkeypatch):
    """Each row's K is made of its own last token, its neighbour's, and its number. The texts of a pair still have the
    distribution, and are independent of each other. (Those of ``coupled`` are those of plain decoding.)"""

    def wanted(planner: StepPlanner) -> tuple[list[int], bool]:
        last = [record.text[-1] if record is not None else 0 for record in planner.sequences]
        return [(last[row] + last[row ^ 1] + row // 2) % 3 for row in range(len(last))], True

    monkeypatch.setattr(StepPlanner, "wanted_drafts", wanted)
    count = 6_000
    result = generate(
        toy_model(1),
        toy_model(2),
        [list(PROMPT)] * count,
        AdaptiveDrafts(costs=[1.0] * 9),
        max_new_tokens=3,
        params=SamplingParams(1.2),
        seed=list(range(count)),
        rule=rule,
    )
    assert all(result.stats.steps_by_drafts[k] > count / 10 for k in range(3))
    texts, distribution = [tuple(text) for text in result.tokens], distribution_of(toy_model(1), [], None)
    assert chi_square(Counter(texts), distribution, level=1e-4).p_value > 1e-4
    ends: Counter = Counter()
    for text, p in distribution.items():
        ends[text[1:]] += p
    pairs = Counter((a[1:], b[1:]) for a, b in zip(texts[::2], texts[1::2], strict=True))
    both = {(a, b): p * q for a, p in ends.items() for b, q in ends.items()}
    assert chi_square(pairs, both, level=1e-4).p_value > 1e-4
