"""Text out of tokens that arrive a few at a time."""

from __future__ import annotations

import pytest
import torch
from specdec.detokenize import IncrementalText, continuation

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
