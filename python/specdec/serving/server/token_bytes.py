"""The bytes that single tokens stand for in texts, by which responses name tokens."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING

from ...detokenize import BYTE_TOKEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenBytes:
    """Token id -> the UTF-8 bytes that it adds to a text; None for an id without a token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        kinds = _decoder_kinds(tokenizer)
        self._bytes_of: dict[str, int] | None = None
        if "ByteLevel" in kinds and "ByteFallback" not in kinds:
            self._bytes_of = _byte_level_alphabet()
        self._fallback = "ByteFallback" in kinds
        # A token is read after others, because decoders treat a first one differently (a leading space, "##"). Which
        # these are does not matter: a vocabulary of words reads "abcdef" as its unknown token.
        ids = tokenizer("abcdef", add_special_tokens=False).input_ids
        self._before = list(tokenizer.convert_ids_to_tokens(ids))
        self._before_text = tokenizer.convert_tokens_to_string(self._before)
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
        text = self._tokenizer.convert_tokens_to_string([*self._before, name])
        if not text.startswith(self._before_text):  # the decoder treats a last one differently
            return self._tokenizer.convert_tokens_to_string([name]).encode()
        return text[len(self._before_text) :].encode()


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
