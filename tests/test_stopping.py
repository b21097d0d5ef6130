"""Stop strings, judged by transformers' own."""

from __future__ import annotations

import random

import pytest
import torch
from specdec.stopping import StopStrings, cut_after
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.generation import StopStringCriteria

ALPHABET = "abcdefhint .é"


def _vocabulary(space: str, extra: list[str]) -> dict[str, int]:
    rng = random.Random(0)
    words = {"".join(rng.choices(ALPHABET, k=rng.randint(1, 4))).replace(" ", space) for _ in range(150)}
    return {token: i for i, token in enumerate([*sorted({*words, *(c.replace(" ", space) for c in ALPHABET)}), *extra])}


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2's: spaces are marked, unknown characters are bytes."""
    vocabulary = _vocabulary("▁", ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))])
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def wordpiece() -> PreTrainedTokenizerFast:
    """As BERT's: tokens continue a word after ``##``, others start with a space."""
    words = _vocabulary("", ["[UNK]"])
    vocabulary = {**words, **{f"##{w}": len(words) + i for i, w in enumerate(w for w in words if w)}}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module", params=("byte-level", "sentencepiece", "wordpiece"))
def tokenizer(request: pytest.FixtureRequest):
    if request.param == "byte-level":
        return request.getfixturevalue("pair")[2]
    return {"sentencepiece": sentencepiece, "wordpiece": wordpiece}[request.param]()


def test_stop_strings_end_where_transformers_ends(tokenizer):
    """Every token of random texts; the strings are cut out of them anywhere, inside of tokens and of characters'
    neighbours, and changed, so that many nearly match."""
    rng, ids = random.Random(1), sorted(tokenizer.get_vocab().values())
    beyond = max(ids) + 7  # a row of the output without a token
    judged = ended = 0
    for _ in range(12):
        texts = [[rng.choice(ids) for _ in range(30)] for _ in range(6)]
        strings = []
        for text in texts[:3]:
            read = tokenizer.decode(text[5:15])
            start = rng.randrange(max(len(read) - 4, 1))
            strings.append(read[start : start + rng.randint(1, 6)])
        strings = [s for s in strings if s and "\ufffd" not in s] or ["a"]
        for text in texts:
            text[rng.randrange(30)] = beyond
        ours, theirs = StopStrings(tokenizer, strings), StopStringCriteria(tokenizer, strings)
        for n in range(1, 31):
            expected = theirs(torch.tensor([text[:n] for text in texts]), None).tolist()
            assert [ours.first_end(0, text[:n], 1) is not None for text in texts] == expected
            judged += 6
            ended += sum(expected)
    assert 30 < ended < judged - 30


def test_an_id_without_a_token_parts_the_text(tokenizer):
    parts = [i for i in sorted(tokenizer.get_vocab().values()) if len(tokenizer.decode([i]).strip()) == 2][:8]
    beyond = max(tokenizer.get_vocab().values()) + 7
    for first, last in zip(parts[::2], parts[1::2], strict=True):
        whole = tokenizer.decode([parts[0], first, last]).strip()
        ours, theirs = StopStrings(tokenizer, whole), StopStringCriteria(tokenizer, whole)
        for text, expected in (([parts[0], first, last], True), ([parts[0], first, beyond, last], False)):
            assert theirs(torch.tensor([text]), None).item() == expected
            assert (ours.first_end(0, text, 1) is not None) == expected


def test_tokens_without_text_use_up_the_reach():
    """transformers looks back at as many tokens as the string has characters, empty ones included."""
    vocabulary = {"": 0, "s": 1, "t": 2, "o": 3, "<unk>": 4, "p": 5, "a": 6, "b": 7, "c": 8, "d": 9, "e": 10, "f": 11}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    ours, theirs = StopStrings(tokenizer, "sto"), StopStringCriteria(tokenizer, "sto")
    for text in ([1, 2, 3], [1, 0, 2, 3], [1, 2, 3, 0], [6, 1, 2, 3], [1, 2, 0], [0, 1, 2, 3], [1, 2, 5]):
        assert (ours.first_end(0, text, 1) is not None) == theirs(torch.tensor([text]), None).item()


def test_a_string_that_begins_in_the_prompt_or_ends_inside_a_token(pair):
    tokenizer = pair[2]
    prompt, new = tokenizer("def read(self").input_ids, tokenizer("):\n    return self").input_ids
    stop = StopStrings(tokenizer, "self):")
    assert stop.first_end(0, prompt, 1) is None
    ends = [stop.first_end(0, prompt + new[: i + 1], i + 1) for i in range(len(new))]
    assert ends == [1] * len(new)  # also where the end is found among several tokens of one step
    later = StopStrings(tokenizer, ["urn s", "never"])
    last = later.first_end(0, prompt + new, len(new))
    read = tokenizer.decode(new[:last])
    assert "urn s" in read and "urn s" not in tokenizer.decode(new[: last - 1]) and not read.endswith("urn s")
    assert cut_after(read, later.strings) == "):\n    return s"


def test_the_first_of_two_ends_in_one_step(pair):
    stop, once = StopStrings(pair[2], "self):"), pair[2]("self):").input_ids
    assert stop.first_end(0, once + once, 2 * len(once)) == stop.first_end(0, once, len(once)) is not None


def test_characters_of_several_tokens(pair):
    """Every byte that is not ASCII, and a string of more tokens than characters."""
    tokenizer, characters = pair[2], [chr(code) for code in range(0x80, 0x100)]
    stop = StopStrings(tokenizer, characters)
    for character in characters:
        ids = tokenizer(character).input_ids
        assert stop.first_end(0, ids, 1) == 1, character
    ids = tokenizer("\u20ac\u20ac").input_ids
    assert len(ids) > 2 and StopStrings(tokenizer, "\u20ac\u20ac").first_end(0, ids, 1) == 1


def test_a_token_costs_the_same_however_long_the_text_is(pair):
    """Counted, not timed: how many tokens are looked at."""
    stop = StopStrings(pair[2], "\n\n\n")
    seen = []
    read, stop._read = stop._read, lambda token: seen.append(token) or read(token)
    stop.first_end(0, list(range(5, 500)), 1)
    assert 0 < len(seen) <= 3


@pytest.mark.parametrize(
    ("text", "strings", "prompt", "expected"),
    [
        ("return self", ["n s"], "", "return s"),
        ("lf): pass", ["self):"], "def f(se", "lf):"),
        ("b", ["ab"], "ab", "b"),  # the prompt's own does not count
        ("one two three", ["three", "two", "ne t"], "", "one t"),
        ("nothing", ["stop"], "stop", "nothing"),
        ("", ["a"], "a", ""),
    ],
)
def test_cut_after(text, strings, prompt, expected):
    assert cut_after(text, strings, prompt) == expected


@pytest.mark.parametrize("strings", ("", [], ["a", ""], [1], 5, None))
def test_stop_strings_are_refused_by_name(pair, strings):
    with pytest.raises(ValueError, match="stop_strings: got"):
        StopStrings(pair[2], strings)
    with pytest.raises(ValueError, match="tokenizer: got"):
        StopStrings(None, ["a"])
