"""How responses name tokens: each by a name of its own, whatever the vocabulary is."""

from __future__ import annotations

import pytest
from specdec.result import Producer, TokenLogProb
from specdec.serving.server.decoded_text import Token
from specdec.serving.server.token_names import TokenBytes, TokenNames
from support.decoders import MADE, made
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


def names(tokenizer) -> TokenNames:
    return TokenNames(TokenBytes(tokenizer))


def told(tokenizer, drawn: int, log_prob: float, *top: tuple[int, float]) -> tuple[str, dict[str, float]]:
    found = names(tokenizer).completion(
        [Token(drawn, "", 0, Producer.BONUS, TokenLogProb(log_prob, 1 + len(top), list(top)))]
    )
    return found["tokens"][0], found["top_logprobs"][0]


def test_rows_of_the_output_without_a_token_have_names(pair):
    """A vocabulary is padded, and biases may choose such a row."""
    tokenizer = pair[2]
    beyond, a = len(tokenizer) + 3, tokenizer.convert_tokens_to_ids("a")
    assert told(tokenizer, beyond, -3.0, (a, -0.5), (beyond + 1, -1.0), (beyond, -3.0)) == (
        f"token_id:{beyond}",
        {"a": -0.5, f"token_id:{beyond + 1}": -1.0, f"token_id:{beyond}": -3.0},
    )


def test_tokens_with_one_text_do_not_replace_each_other():
    """As the byte 0x41 and the letter in vocabularies with bytes. The token that was drawn keeps its text."""
    tokenizer = made(MADE[0])
    byte, letter = tokenizer.convert_tokens_to_ids("<0x20>"), tokenizer.convert_tokens_to_ids("▁")
    assert names(tokenizer).text(byte) == names(tokenizer).text(letter) == " "
    assert told(tokenizer, letter, -2.0, (byte, -1.0), (letter, -2.0)) == (" ", {f"token_id:{byte}": -1.0, " ": -2.0})
    assert told(tokenizer, letter, -2.0, (byte, -1.0)) == (" ", {f"token_id:{byte}": -1.0, " ": -2.0})
    assert told(tokenizer, 0, -2.0, (byte, -1.0), (letter, -1.5)) == (
        names(tokenizer).text(0),
        {" ": -1.0, f"token_id:{letter}": -1.5, names(tokenizer).text(0): -2.0},
    )


@pytest.mark.parametrize("make", MADE)
def test_tokens_of_every_vocabulary_have_the_text_that_they_add(make):
    tokenizer = made(make)
    of = TokenBytes(tokenizer)
    for i in sorted(tokenizer.get_vocab().values()):
        name = tokenizer.convert_ids_to_tokens(i)
        bare = name.strip("▁#Ġ").removesuffix("</w>")
        if bare.isalpha() and bare.isascii():
            assert of(i).decode().strip().removeprefix("##") == bare, name


def test_a_vocabulary_of_words():
    words = ["<unk>", "one", "two"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    of = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"))
    assert [of(i) for i in range(4)] == [b" <unk>", b" one", b" two", None]
