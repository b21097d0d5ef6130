"""Stop strings, judged by the whole text, and by transformers' own."""

from __future__ import annotations

import os
import random

import pytest
import torch
from specdec import FinishReason, SpeculativeDecoder
from specdec.stopping import StopStrings, cut_after
from support.decoders import MADE, made
from support.models import toy_model
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.generation import StopStringCriteria

from specdec_kernels import SamplingParams


@pytest.fixture(params=[*MADE, None], ids=lambda make: getattr(make, "__name__", "embedded"))
def tokenizer(request):
    return request.getfixturevalue("pair")[2] if request.param is None else made(request.param)


def units(tokenizer) -> list[list[int]]:
    """The tokens, those of single bytes as whole characters: a run of bytes that are none is no text."""
    names = tokenizer.get_vocab()
    characters = [[names.get(f"<0x{byte:02X}>") for byte in character.encode()] for character in "é日 A"]
    alone = [[i] for name, i in sorted(names.items()) if not name.startswith("<0x")]
    return alone + 8 * [each for each in characters if None not in each]


def test_stop_strings_end_where_the_text_has_them(tokenizer):
    """Random texts, decoded as a whole; strings are cut out of them anywhere, inside of tokens and around special
    ones, and some of them are in other texts, too."""
    rng, parts = random.Random(1), units(tokenizer)
    decode = tokenizer.decode
    judged = ended = 0
    for _ in range(100):
        some = rng.sample(parts, min(rng.choice((3, 6, 30)), len(parts)))
        first = rng.choice(some)  # a prompt does not end inside of a character
        text = [*first, *(token for _ in range(40) for token in rng.choice(some))]
        read = decode(text)
        strings = []
        for _ in range(3):
            start = rng.randrange(max(len(read) - 4, 1))
            strings.append(read[start : start + rng.choice((1, 2, 5, 25))])
        strings = [s for s in strings if s and "\ufffd" not in s] or ["zzz"]
        stop, size = StopStrings(tokenizer, strings), rng.choice((1, 1, 2, 5))
        for start in range(len(first), len(text) - size, size):
            expected = None
            for n in range(1, size + 1):
                before, whole = (decode(text[: start + m]).rstrip("\ufffd") for m in (0, n))
                new = len(os.path.commonprefix([before, whole]))
                if any(whole.find(s, max(new - len(s) + 1, 0)) >= 0 for s in strings):
                    expected = n
                    break
            assert stop.first_end(0, text[: start + size], size) == expected, (strings, text, start)
            judged += 1
            if expected is not None:
                ended += 1
                break
    assert ended > 50 and judged > 250


def letters(space: str, decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    """Random words of letters, one to four of them."""
    rng, alphabet = random.Random(0), "abcdefhint .é"
    words = {"".join(rng.choices(alphabet, k=rng.randint(1, 4))).replace(" ", space) for _ in range(150)}
    names = [*sorted({*words, *(c.replace(" ", space) for c in alphabet)}), "<unk>"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("kind", ("byte-level", "sentencepiece", "metaspace"))
def test_stop_strings_end_where_transformers_ends(pair, kind):
    """With ordinary vocabularies, at the same token of random texts."""
    tokenizer = pair[2]
    if kind == "sentencepiece":
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer = letters("▁", decoders.Sequence(parts))
    elif kind == "metaspace":
        tokenizer = letters("▁", decoders.Metaspace())
    rng, ids = random.Random(1), sorted(tokenizer.get_vocab().values())
    judged = ended = 0
    for _ in range(12):
        texts = [[rng.choice(ids) for _ in range(30)] for _ in range(6)]
        strings = []
        for text in texts[:3]:
            read = tokenizer.decode(text[5:15])
            start = rng.randrange(max(len(read) - 4, 1))
            strings.append(read[start : start + rng.randint(1, 6)])
        strings = [s for s in strings if s and "\ufffd" not in s] or ["a"]
        ours, theirs = StopStrings(tokenizer, strings), StopStringCriteria(tokenizer, strings)
        for n in range(2, 31):  # the first token has no space before it, of which transformers does not know
            expected = theirs(torch.tensor([text[:n] for text in texts]), None).tolist()
            found = [ours.first_end(0, text[:n], 1) is not None for text in texts]
            assert found == expected, (n, strings, [tokenizer.decode(text[:n]) for text in texts])
            judged += 6
            ended += sum(expected)
    assert 30 < ended < judged - 30


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


def test_a_token_costs_the_same_however_long_the_text_is(tokenizer, monkeypatch):
    """Counted, not timed: how many tokens are decoded."""
    rng, parts, seen = random.Random(2), units(tokenizer), []
    text = [token for _ in range(2000) for token in rng.choice(parts)]
    for string in ("zzz", "zzz" * 20):
        stop = StopStrings(tokenizer, string)
        decode = stop._detokenizer.decode
        monkeypatch.setattr(stop._detokenizer, "decode", lambda some, own=decode: seen.append(len(some)) or own(some))
        for start in range(1000, 1100):
            assert stop.first_end(0, text[:start], 1) is None
    assert max(seen) < 400 and sum(seen) < 200 * 200


# ---- vocabularies that cannot spell everything


def words(*names: str, decoder: decoders.Decoder | None = None, kind=models.WordLevel) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(kind({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    if decoder is not None:
        tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=names[0])


WORDS = {
    "words": (words("<unk>", "one", "two", "three", "four"), "four", [1, 4]),
    "across words": (words("<unk>", "one", "two", "three", "four"), "e f", [3, 4]),
    "pieces": (
        words("[UNK]", "stop", "##ping", "##ped", "go", decoder=decoders.WordPiece(), kind=models.WordPiece),
        "stopped",
        [1, 3],
    ),
    "pieces of two words": (
        words("[UNK]", "stop", "##ping", "##ped", "go", decoder=decoders.WordPiece(), kind=models.WordPiece),
        "ping g",
        [2, 4],
    ),
    "digits": (words("?", "0", "1", "2", "3", decoder=decoders.Fuse()), "132", [2, 4, 3]),
    "DNA": (words("N", "A", "C", "G", "T", decoder=decoders.Fuse()), "GAT", [3, 1, 4]),
    "proteins": (words("X", "M", "K", "V", "L"), "K V", [2, 3]),
}


@pytest.mark.parametrize("name", WORDS)
def test_vocabularies_that_cannot_spell_everything(name):
    """The texts of a decoder end where their string is whole, and have no earlier one."""
    tokenizer, string, _ = WORDS[name]
    target, seeds = toy_model(1), list(range(40))
    own = {"max_new_tokens": 12, "params": SamplingParams(3.0), "rule": "coupled", "eos_token_id": [], "seed": seeds}
    decoder = SpeculativeDecoder(target, toy_model(2), 3)
    plain = decoder.generate([[1, 2]] * 40, **own).tokens
    result = decoder.generate([[1, 2]] * 40, stop=StopStrings(tokenizer, string), **own)
    stopped = 0
    for tokens, whole, reason in zip(result.tokens, plain, result.finish_reason, strict=True):
        assert tokens == whole[: len(tokens)]
        read, before = (tokenizer.decode([1, 2, *each]) for each in (tokens, tokens[:-1]))
        ended = reason is FinishReason.STOP
        assert (string in read) == ended and string not in before
        stopped += ended
    assert 0 < stopped < 40


@pytest.mark.parametrize("name", WORDS)
def test_a_string_ends_with_the_token_that_completes_it(name):
    tokenizer, string, tokens = WORDS[name]
    stop = StopStrings(tokenizer, string)
    for n in range(1, len(tokens) + 1):
        assert stop.first_end(0, [2, *tokens[:n]], n) == (n if n == len(tokens) else None)
    assert stop.first_end(0, [2, *tokens, 2], len(tokens) + 1) == len(tokens)


def test_special_tokens_can_be_named(pair):
    """As with transformers'."""
    tokenizer = pair[2]
    end = tokenizer.eos_token_id
    for string in (tokenizer.eos_token, f"a{tokenizer.eos_token}"):
        text = [*tokenizer("b a").input_ids, end]
        assert StopStrings(tokenizer, string).first_end(0, text, 1) == 1
        assert StopStringCriteria(tokenizer, [string])(torch.tensor([text]), None).item()


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
