"""What ends a sequence besides end-of-sequence tokens and its length: stop strings, or other criteria."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .checks import refuse
from .detokenize import BYTE_TOKEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StoppingCriteria(Protocol):
    """Ends sequences because of their text, in addition to end-of-sequence tokens."""

    def first_end(self, sequence: int, text: list[int], new: int) -> int | None:
        """Returns how many of the last ``new`` >= 1 tokens of ``text`` (prompt and output of ``sequence``) are kept if
        the sequence ends among them, >= 1; None if it continues. Called once for each step's tokens, in order."""


def read_stop_strings(strings: str | Sequence[str]) -> tuple[str, ...]:
    """One or several. Raises ValueError naming ``stop_strings``."""
    strings = (strings,) if isinstance(strings, str) else strings
    if not isinstance(strings, Sequence) or not strings or not all(isinstance(s, str) and s for s in strings):
        refuse("stop_strings", repr(strings), "a string or several, none of them empty")
    return tuple(strings)


class StopStrings:
    """Ends a sequence with the token that completes one of ``strings``; that token is kept as a whole.

    The judgement is that of transformers' ``StopStringCriteria``: a string counts if it ends in the last token,
    whatever token or prompt it began in. What tokens read as is joined and searched, no text is decoded again:
    byte-level vocabularies are compared as bytes, so a string may begin or end inside of a token, and a token inside
    of a character. A token costs a search through as many tokens as the longest string has bytes.

    Args:
        tokenizer: the target's.
        strings: one or several, none of them empty.

    Raises:
        ValueError: names the argument.

    Example:
        >>> from specdec import SpeculativeDecoder, StopStrings, load_embedded_pair
        >>> target, draft, tokenizer = load_embedded_pair()
        >>> stop, prompt = StopStrings(tokenizer, [":"]), tokenizer("def read(self").input_ids
        >>> result = SpeculativeDecoder(target, draft).generate([prompt], max_new_tokens=64, stop=stop)
        >>> tokenizer.decode(result.tokens[0])[-1:], str(result.finish_reason[0])
        (':', 'stop')
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: str | Sequence[str]):
        self.strings = read_stop_strings(strings)
        if not callable(getattr(tokenizer, "convert_ids_to_tokens", None)):
            refuse("tokenizer", type(tokenizer).__name__, "the target's tokenizer, which stop strings need")
        self._read = TokenBytes(tokenizer)
        # Compared as UTF-8 also where tokens are read as characters: the ends are then at the same places.
        self._targets = [s.encode() for s in self.strings]
        # How many tokens transformers looks at: the length of the longest string, in characters or in bytes. Tokens
        # without text count as well.
        self._reach = max(len(s) if self._read.in_characters else len(s.encode()) for s in self.strings)

    def first_end(self, sequence: int, text: list[int], new: int) -> int | None:
        """Returns how many of the last ``new`` tokens of ``text`` are kept; None: no string ends in them."""
        for kept in range(1, new + 1):
            end = len(text) - new + kept
            if self._ends_with(text[max(end - self._reach, 0) : end]):
                return kept
        return None

    def _ends_with(self, tokens: list[int]) -> bool:
        """Whether a string ends in the last of ``tokens``."""
        last = self._read(tokens[-1])
        if not last:
            return False
        pieces = [last]
        for token in reversed(tokens[:-1]):
            piece = self._read(token)
            if piece is None:  # not a token of the vocabulary: no string goes across it
                break
            pieces.append(piece)
        joined = b"".join(reversed(pieces))
        before = len(joined) - len(last)
        # A string that ends in the last token starts here or later.
        return any(joined.find(target, max(before - len(target) + 1, 0)) >= 0 for target in self._targets)


class TokenBytes:
    """Token id -> the UTF-8 bytes that it adds to a text; None for an id without a token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        kinds = _decoder_kinds(tokenizer)
        self._bytes_of: dict[str, int] | None = None
        if "ByteLevel" in kinds and "ByteFallback" not in kinds:
            self._bytes_of = _byte_level_alphabet()
        self._fallback = "ByteFallback" in kinds
        self.in_characters = not kinds & {"ByteLevel", "ByteFallback"}
        # A token is read after this text, because decoders treat a first token differently (a leading space, "##").
        self._before = tokenizer.convert_ids_to_tokens(tokenizer(_BEFORE, add_special_tokens=False)["input_ids"])
        self._known: dict[int, bytes | None] = {}

    def __call__(self, token: int) -> bytes | None:
        if token not in self._known:
            self._known[token] = self._of(token)
        return self._known[token]

    def _of(self, token: int) -> bytes | None:
        try:
            name: str | None = list(self._tokenizer.convert_ids_to_tokens([token]))[0]
        except (IndexError, KeyError, OverflowError, ValueError):
            name = None
        if name is None:
            return None
        if self._bytes_of is not None and all(c in self._bytes_of for c in name):
            return bytes(self._bytes_of[c] for c in name)
        if self._fallback and (byte := BYTE_TOKEN.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        _, found, text = self._tokenizer.convert_tokens_to_string([*self._before, name]).partition(_BEFORE)
        return text.encode() if found else None


_BEFORE = "abcdef"


def _decoder_kinds(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The names of the parts of a fast tokenizer's decoder."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return set()
    kinds = {type(decoder).__name__}
    try:
        waiting = [json.loads(decoder.__getstate__())]
    except (AttributeError, TypeError, ValueError):  # a decoder written in Python shows no parts
        return kinds
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            kinds.add(str(part.get("type")))
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return kinds


@functools.cache
def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte in byte-level vocabularies (GPT-2's): printable Latin-1 is itself, the rest is U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def cut_after(text: str, strings: Sequence[str], prompt: str = "") -> str:
    """``text`` up to the end of the first of ``strings``, which may have begun in the ``prompt`` before it; all of it
    where there is none. A stop string's last token can have more text after it: for showing, this takes it away."""
    whole = prompt + text
    ends = []
    for string in strings:
        start = whole.find(string, max(len(prompt) - len(string) + 1, 0))
        if start >= 0:
            ends.append(start + len(string))
    return whole[len(prompt) : min(ends, default=len(whole))]
