"""Text out of tokens that arrive a few at a time."""

from __future__ import annotations

import random

import pytest
import torch
from specdec.detokenize import Detokenizer, IncrementalText, continuation
from support.decoders import MADE, byte_fallback, made, metaspace, strips_two_spaces

TEXT = "x = 'naïve — 日本語 🎉\U0001f468\u200d\U0001f469' # \tq\r\n"


@pytest.mark.parametrize("start", (1, 3))
@pytest.mark.parametrize("size", (1, 2, 3))
def test_pieces_are_whole_characters(pair, start, size):
    tokenizer = pair[2]
    ids = tokenizer(TEXT).input_ids
    assert len(ids) > len(TEXT) - 5  # characters are split
    text = IncrementalText(tokenizer, ids[:start])
    pieces = [text.push(ids[i : i + size]) for i in range(start, len(ids), size)]
    assert not any("\ufffd" in piece for piece in pieces) and "" in pieces
    assert text.finish() == ""
    assert tokenizer.decode(ids[:start]) + "".join(pieces) == TEXT
    assert continuation(tokenizer, ids[:start], ids[start:]) == "".join(pieces)


def test_any_tokens_stream_to_their_whole_text(pair):
    """Also those that never become characters, and special ones, which have no text."""
    tokenizer = pair[2]
    generator = torch.Generator().manual_seed(0)
    for upper in (256, 4096):
        ids = torch.randint(upper, (200,), generator=generator).tolist()
        text = IncrementalText(tokenizer)
        pieces = [text.push([i]) for i in ids]
        assert "".join(pieces) + text.finish() == tokenizer.decode(ids, skip_special_tokens=True)
    assert IncrementalText(tokenizer, ids[:3]).push(tokenizer.all_special_ids) == ""


def test_half_a_character_is_shown_at_the_end(pair):
    tokenizer = pair[2]
    ids = tokenizer("a日").input_ids
    text = IncrementalText(tokenizer, ids[:1])
    assert text.push(ids[1:-1]) == "" and set(text.finish()) == {"\ufffd"}


# ---- windows of tokens say what the whole says


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer):
        self.convert_ids_to_tokens, self.all_special_ids = tokenizer.convert_ids_to_tokens, tokenizer.all_special_ids
        self._decode, self.decoded = tokenizer.decode, 0

    def decode(self, tokens, **how):
        self.decoded += len(tokens)
        return self._decode(tokens, **how)


@pytest.fixture(params=[*MADE, None], ids=lambda make: getattr(make, "__name__", "embedded"))
def any_tokenizer(request):
    return request.getfixturevalue("pair")[2] if request.param is None else made(request.param)


def test_pieces_are_the_whole_text_whatever_the_tokens(any_tokenizer):
    """Random tokens: special ones and halves of characters in all places, also at the end of the prompt."""
    tokenizer, rng = any_tokenizer, random.Random(0)
    ids, known = sorted({*tokenizer.get_vocab().values()}), Detokenizer(tokenizer)
    texts = 0
    for _ in range(400):
        some = rng.sample(ids, rng.choice((2, 3, 8, len(ids))))  # few: they repeat
        tokens = [rng.choice(tokenizer.all_special_ids if rng.random() < 0.1 else some) for _ in range(30)]
        start, size = rng.choice((0, 1, 2, 5)), rng.choice((1, 1, 2, 7))
        text = IncrementalText(known, tokens[:start])
        pieces = [text.push(tokens[i : i + size]) for i in range(start, len(tokens), size)]
        prompt, whole = (tokenizer.decode(t, skip_special_tokens=True) for t in (tokens[:start], tokens))
        assert (
            "".join(pieces) + text.finish()
            == whole[len(prompt) :]
            == continuation(tokenizer, tokens[:start], tokens[start:])
        ), (tokens, start)
        assert text.finish() == ""
        texts += sum(map(bool, pieces)) > 5
    assert texts > 100


def test_a_token_costs_the_same_however_long_the_text_is(any_tokenizer):
    rng, ids = random.Random(1), sorted({*any_tokenizer.get_vocab().values()})
    tokens = [rng.choice(ids) for _ in range(1600)]
    costs = []
    for n in (400, 800, 1600):
        counting = Counting(any_tokenizer)
        text = IncrementalText(counting, [])
        for token in tokens[:n]:
            text.push([token])
        costs.append(counting.decoded)
    assert costs[2] - costs[1] < 3 * (costs[1] - costs[0]) and costs[2] < 100 * 1600


@pytest.mark.parametrize("name", ("▁", "▁▁", "▁a", "<s>"))
@pytest.mark.parametrize("make", (byte_fallback, strips_two_spaces, metaspace))
def test_nor_does_it_where_one_token_repeats(make, name):
    tokenizer = made(make)
    counting, tokens = Counting(tokenizer), [tokenizer.convert_tokens_to_ids(name)] * 1000
    text = IncrementalText(counting)
    assert "".join(text.push([token]) for token in tokens) == tokenizer.decode(tokens, skip_special_tokens=True)
    assert counting.decoded < 50_000
