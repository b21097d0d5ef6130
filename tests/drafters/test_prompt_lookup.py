"""Prompt lookup: what it proposes, against a search of the whole text, and that the loop's texts do not change."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec import PromptLookupDrafter, SuffixDrafter
from support.drafting import Repeats, check_plain_texts, copied, draft, found, start
from support.models import generate, prompts, tiny_model, toy_model

from specdec_kernels import SamplingParams


def search(text: list[int], sizes: range, most: int) -> tuple[list[int], int]:
    """What prompt lookup is to propose, and how many tokens match, from its definition."""
    for n in reversed(sizes):
        for end in range(len(text) - 1, n - 1, -1):
            if n < len(text) and text[end - n : end] == text[-n:]:
                return copied(text, end, most), n if most else 0
    return [], 0


texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    prompts=st.lists(texts, min_size=1, max_size=3),
    growth=st.lists(st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(0, 3), max_size=7)), max_size=3)),
    sizes=st.sampled_from([(1, 1), (1, 3), (2, 3), (2, 5), (4, 4)]),
)
def test_proposals_are_those_of_a_search(prompts, growth, sizes):
    """Texts grow by 0 to 7 tokens between steps, and some do not draft."""
    session = start(PromptLookupDrafter(max_ngram=sizes[1], min_ngram=sizes[0]), prompts)
    known = [list(p) for p in prompts]
    for changes in [[], *growth]:
        allowed = [4] * len(known)
        for b, (most, new) in enumerate(changes[: len(known)]):
            known[b] += new
            allowed[b] = most
        if max(allowed):
            expected = [search(t, range(sizes[0], sizes[1] + 1), most) for t, most in zip(known, allowed, strict=True)]
            assert [*zip(*found(session, known, allowed)[:2], strict=True)] == expected


def test_examples():
    def propose(text, most, **sizes):
        return draft(start(PromptLookupDrafter(**sizes), [text]), [text], most)[0]

    assert propose([1, 2, 3, 4, 5, 1, 2], 2) == [3, 4]
    assert propose([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 2) == [4, 9]  # the most recent
    assert propose([7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2], 2) == [3, 9]  # the longest first
    assert propose([7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2], 2, max_ngram=2) == [4, 7]
    assert propose([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]  # a period goes on
    assert propose([1, 2, 3, 2], 3) == [] and propose([1, 2, 3, 2], 3, min_ngram=1) == [3, 2, 3]
    assert propose([5], 3) == propose([5, 6], 3) == []


def test_nothing_is_drafted_after_an_end_of_sequence_that_was_copied():
    """Each sequence has ends of its own. The end itself is drafted."""
    texts = [[1, 2, 9, 8, 7, 1, 2]] * 4
    ends = [frozenset(), frozenset({9, 7}), frozenset({8}), frozenset({2})]
    session = start(PromptLookupDrafter(), texts, ends)
    assert draft(session, texts, 5) == [[9, 8, 7, 1, 2], [9], [9, 8], [9, 8, 7, 1, 2]]


@pytest.mark.parametrize("drafter", (PromptLookupDrafter(min_ngram=1), SuffixDrafter()), ids=lambda d: type(d).__name__)
def test_a_text_that_ends_wastes_no_drafts(drafter):
    """In the loop: the text repeats its prompt up to the end that the prompt has, the 20th new token."""
    text = prompts(1, 30, 30)[0]
    end = text[24]
    assert text.count(end) == 1
    settings = {"max_new_tokens": 60, "logits_processor": [Repeats(30)], "eos_token_id": end}
    result = generate(tiny_model(), drafter, [text + text[:5], text + text[:5]], 8, **settings)
    assert result.tokens == [text[5:25]] * 2
    assert result.stats.drafted == result.stats.tested == result.stats.accepted


def test_repeated_text_is_drafted_well():
    text = prompts(1, 30, 30)[0] * 4
    session = start(PromptLookupDrafter(), [text[:32]])
    for known in range(32, 112, 8):
        assert draft(session, [text[:known]], 8) == [text[known : known + 8]]
    result = generate(
        tiny_model(), PromptLookupDrafter(), [text[:35]] * 2, 8, max_new_tokens=81, logits_processor=[Repeats(30)]
    )
    assert result.tokens == [(text * 2)[35:116]] * 2
    assert result.stats.tau == 9


@pytest.mark.parametrize("num_drafts", (1, 3, 8))
@pytest.mark.parametrize("sizes", ({}, {"min_ngram": 1}))
def test_greedy_and_coupled_texts_are_the_plain_ones(num_drafts, sizes):
    check_plain_texts(lambda: PromptLookupDrafter(**sizes), num_drafts)


@pytest.mark.parametrize(
    "arguments",
    ({"max_ngram": 0}, {"max_ngram": True}, {"max_ngram": 2.0}, {"min_ngram": 0}, {"max_ngram": 2, "min_ngram": 3}),
)
def test_arguments_are_checked(arguments):
    name = list(arguments)[-1]
    with pytest.raises(ValueError, match=rf"^{name}: got {arguments[name]!r}, allowed: an integer"):
        PromptLookupDrafter(**arguments)


@pytest.mark.parametrize("rule", (pytest.param("token", marks=pytest.mark.nightly), "block"))
def test_sampled_text_has_the_distribution_of_the_target(rule):
    """All 125 texts of three of five tokens, 10,000 sequences: chi-square with 124 degrees of freedom, whose 99.99 %
    quantile is 190."""
    target, count, prompt = toy_model(1), 10_000, [1, 2, 0, 3, 1, 4, 2, 1]
    arguments = {"max_new_tokens": 3, "params": SamplingParams(1.3), "seed": list(range(count)), "rule": rule}
    result = generate(target, PromptLookupDrafter(min_ngram=1), [prompt] * count, 2, **arguments)
    assert 0.05 < result.stats.alpha < 0.95
    texts = list(itertools.product(range(5), repeat=3))
    with torch.inference_mode():
        logits = target(torch.tensor([[*prompt, *t] for t in texts])).logits[:, len(prompt) - 1 : -1] / 1.3
    chosen = logits.double().log_softmax(-1).gather(2, torch.tensor(texts)[..., None])
    expected = (chosen.sum((1, 2)).exp() * count).tolist()
    observed = Counter(map(tuple, result.tokens))
    terms = [(observed[t] - e) ** 2 / e for t, e in zip(texts, expected, strict=True) if e >= 5]
    assert len(terms) > 60
    assert sum(terms) < 190
