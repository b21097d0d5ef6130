"""Target and draft of other dtypes, and of vocabularies that are padded to other widths: the distribution is the
target's."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from specdec import SpeculativeDecoder
from support.models import VOCABULARY, generate, prompts, toy_model, tunable_pair
from support.texts import check_text_distribution
from transformers import SuppressTokensLogitsProcessor

from specdec_kernels import SamplingParams

COUNTS = (3_000, pytest.param(50_000, marks=pytest.mark.nightly))
SAMPLED = {
    "params": SamplingParams(temperature=0.8, top_k=40, top_p=0.95),
    "seed": list(range(6)),
    "max_new_tokens": 12,
}
DISTRIBUTIONS = (
    {"max_new_tokens": 12},
    {**SAMPLED, "rule": "token"},
    {**SAMPLED, "rule": "block"},
    {**SAMPLED, "rule": "coupled"},
)


def counts(result) -> tuple:
    return result.tokens, result.stats.drafted_by_position, result.stats.accepted


# ---- dtypes --------------------------------------------------------------------------------------------------


PAIRS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
]


@functools.cache
def in_dtype(model, dtype: torch.dtype):
    return copy.deepcopy(model).to(dtype)


@pytest.mark.parametrize("target_dtype, draft_dtype", PAIRS)
def test_one_model_in_two_dtypes_agrees_with_itself(target_dtype, draft_dtype):
    target, draft = (in_dtype(tunable_pair(0.3)[0], dtype) for dtype in (target_dtype, draft_dtype))
    ragged = prompts(6, 2, 20)
    for sampling in DISTRIBUTIONS:
        result = generate(target, draft, ragged, **sampling)
        assert result.stats.acceptance_rate > 0.85 and not any(result.status)
        # In 16 bits a forward of five tokens rounds otherwise than one of one.
        if target_dtype == torch.float32 and sampling.get("rule", "coupled") == "coupled":
            assert result.tokens == generate(target, None, ragged, 0, **sampling).tokens


@pytest.mark.parametrize("count", COUNTS)
def test_the_distribution_is_that_of_the_target_in_its_dtype(count):
    for target_dtype, draft_dtype in PAIRS[1:3]:
        check_text_distribution(in_dtype(toy_model(1), target_dtype), in_dtype(toy_model(2), draft_dtype), count)


# ---- widths --------------------------------------------------------------------------------------------------


def of_width(model, size: int):
    """``model`` with so many tokens; new ones are its favourites."""
    other = copy.deepcopy(model)
    old = other.config.vocab_size
    other.resize_token_embeddings(size, mean_resizing=False)
    if size > old:
        with torch.no_grad():
            other.lm_head.weight[old:] = 3 * other.lm_head.weight[: size - old]
            other.model.embed_tokens.weight[old:] = float("nan")  # never to be fed
    return other.eval()


@pytest.mark.parametrize("sampling", DISTRIBUTIONS[::2], ids=str)
def test_columns_that_the_target_lacks_are_never_drafted(sampling):
    target, draft = tunable_pair(0.3)
    ragged, wide = prompts(6, 2, 20), of_width(draft, VOCABULARY + 9)
    assert counts(generate(target, wide, ragged, d2t=range(VOCABULARY), **sampling)) == counts(
        generate(target, draft, ragged, **sampling)
    )


@pytest.mark.parametrize("sampling", DISTRIBUTIONS[::2], ids=str)
def test_a_draft_may_lack_tokens_that_the_target_emits(sampling):
    """As if it gave them a probability of 0, and had read its last one where they stand."""
    n = 60
    target, draft = tunable_pair(0.3)
    ragged, narrow = prompts(6, 2, 20), of_width(draft, n)
    whole, keep = copy.deepcopy(draft), torch.arange(n)
    with torch.no_grad():
        whole.model.embed_tokens.weight[n:] = whole.model.embed_tokens.weight[n - 1]
    assert any(t >= n for p in ragged for t in p)
    result = generate(target, narrow, ragged, d2t=range(n), **sampling)
    assert any(t >= n for text in result.tokens for t in text) and result.stats.accepted > 0
    assert counts(result) == counts(generate(target, whole, ragged, d2t=keep, **sampling))
    if sampling.get("rule", "coupled") == "coupled":
        assert result.tokens == generate(target, None, ragged, 0, **sampling).tokens


@pytest.mark.parametrize("count", COUNTS)
def test_the_distribution_with_a_draft_of_another_width(count):
    for size in (4, 8):
        check_text_distribution(toy_model(1), of_width(toy_model(2), size), count, d2t=range(min(size, 5)))


def test_padding_of_the_target_can_be_banned():
    """transformers leaves it be, and so do we unless told."""
    (target, draft), ragged, tokens = tunable_pair(0.3), prompts(6, 2, 20), 90
    tail = range(tokens, VOCABULARY)
    for sampling in DISTRIBUTIONS[::2]:
        banned = generate(target, draft, ragged, banned_tokens=tail, **sampling)
        suppressed = generate(target, draft, ragged, logits_processor=[SuppressTokensLogitsProcessor(tail)], **sampling)
        assert counts(banned) == counts(suppressed)
        assert max(t for text in banned.tokens for t in text) < tokens
        assert max(t for text in generate(target, draft, ragged, **sampling).tokens for t in text) >= tokens


def test_what_no_padding_explains_is_refused():
    target, draft = tunable_pair(0.3)
    narrow = of_width(draft, 60)
    for d2t, message in (
        (range(61), "draft: got an embedding of 60 tokens with d2t, allowed: 101"),
        ([*range(59), 60], "draft: got an embedding of 60 tokens with d2t, allowed: 101"),
        (range(0), "d2t: got .*, allowed: 60 integers"),
    ):
        with pytest.raises(ValueError, match=message):
            SpeculativeDecoder(target, narrow, d2t=d2t)
