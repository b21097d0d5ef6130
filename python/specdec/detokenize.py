"""Text out of tokens that arrive a few at a time."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_TOKEN = re.compile("<0x([0-9a-fA-F]{2})>")  # tokens for single bytes in vocabularies with byte fallback
INCOMPLETE = "\ufffd"  # a decoder's character for bytes that are not a whole character
_LONG = 32  # tokens of a window of nothing but spaces


class Detokenizer:
    """The texts that a tokenizer gives to tokens. Those of single tokens are remembered, because every token of every
    text asks for one: a server has one object for all its texts.

    Args:
        tokenizer: the target's.
        hidden: ids of the tokens that have no text. None: the tokenizer's special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, hidden: Collection[int] | None = None):
        self.special = frozenset(tokenizer.all_special_ids if hidden is None else hidden)
        self._tokenizer, self._shows_others = tokenizer, hidden is not None
        self._alone: dict[int, str] = {}
        self._bytes: dict[int, int | None] = {}

    def decode(self, tokens: Sequence[int]) -> str:
        if len(tokens) != 1:
            return self._decode(tokens)
        if (text := self._alone.get(tokens[0])) is None:
            text = self._alone[tokens[0]] = self._decode(tokens)
        return text

    def _decode(self, tokens: Sequence[int]) -> str:
        if not self._shows_others:
            return _decode(self._tokenizer, tokens)
        return _decode(self._tokenizer, [t for t in tokens if t not in self.special], skip_special_tokens=False)

    def byte(self, token: int) -> int | None:
        """The byte that a token stands for alone, as a part of a run of bytes, which the next byte can still make
        invalid as a whole; None: it stands for something else."""
        if token not in self._bytes:
            name = self._tokenizer.convert_ids_to_tokens(token)
            found = BYTE_TOKEN.fullmatch(name) if isinstance(name, str) else None
            self._bytes[token] = None if found is None else int(found[1], 16)
        return self._bytes[token]

    def window(self, tokens: Sequence[int], start: int) -> int:
        """The last place from ``start`` on to the left where decoding may begin, so that what follows the first token
        reads as in the whole text: not inside of a character, nor at a space, which decoders strip."""
        for place in range(start, max(start - _LONG, 0), -1):
            byte = self.byte(tokens[place])
            if self.decode(tokens[place : place + 1]) and (byte is None or byte & 0xC0 != 0x80):
                return place
        return max(start - _LONG, 0)


class IncrementalText:
    """The text that continues a prompt. Pieces are final: joined, they are the text that decoding everything gives.

    The text of a token depends on its neighbours: decoders strip the space of a first token, tokens can be parts of a
    character, and a run of single bytes is a text or is not as a whole. So a token is decoded in a window, after the
    tokens of the piece before it, and what it adds to the text of that window is new. Windows are a few tokens long,
    whatever the length of the text; they grow only while there is no complete character. Special tokens (the end of a
    sequence) have no text.

    Args:
        tokenizer: the target's, or what is known of it.
        prompt: the token ids that are continued; their text is not handed out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | Detokenizer, prompt: Sequence[int] = ()):
        self._detokenizer = tokenizer if isinstance(tokenizer, Detokenizer) else Detokenizer(tokenizer)
        self._window = list(prompt)
        self._old = len(self._window)  # tokens of the window whose text was handed out
        self._text = self._detokenizer.decode(self._window)  # of the window
        self._shown = len(self._text)  # characters of it that were handed out

    def push(self, tokens: Sequence[int]) -> str:
        """Takes the next tokens and returns the text that they completed, maybe none."""
        return "".join(map(self._push, tokens))

    def finish(self) -> str:
        """The rest: bytes that never became a character."""
        return self._new(self._text)

    def _push(self, token: int) -> str:
        self._window.append(token)
        before, self._text = self._text, self._detokenizer.decode(self._window)
        if self._text == before and token in self._detokenizer.special:
            self._window.pop()
        if self._text == before or self._detokenizer.byte(token) is not None:
            return ""
        piece = self._new(self._text.rstrip(INCOMPLETE))
        if piece and not self._text.endswith(INCOMPLETE):
            self._move()
        return piece

    def _move(self) -> None:
        """Lets the next window begin with the tokens of the newest piece, unless they are spaces that the decoder
        strips at the beginning of a text: it would strip those of the next token instead."""
        newest = self._window[self._old :]
        text = self._detokenizer.decode(newest)
        if not text and len(self._window) > _LONG:
            newest = self._window[-_LONG // 2 :]
            text = self._detokenizer.decode(newest)
        if text or len(self._window) > _LONG:
            self._window, self._text, self._shown = newest, text, len(text)
        self._old = len(self._window)

    def _new(self, text: str) -> str:
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new


def continuation(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of ``tokens`` after ``prompt``, both token ids: the same text that streaming them shows."""
    return _decode(tokenizer, [*prompt, *tokens])[len(_decode(tokenizer, prompt)) :]


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
    settings = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(list(tokens), **settings))
