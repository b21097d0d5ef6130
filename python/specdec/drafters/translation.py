"""Translates tokens of one tokenizer into those of another by way of text, which is re-encoded only near its end."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ..detokenize import INCOMPLETE

CONTEXT = 8  # tokens on the left that are decoded or encoded together with a text
UNSETTLED = 16  # tokens at the end that more text may change
SETTLE_AT = 64  # most tokens at the end that are encoded again in every step
MOST_PENDING = 3  # most tokens that can begin a character without completing it, as a character has up to four bytes


class TokenText:
    """Decodes and encodes a part of a text after its context. Some tokenizers drop or add a space at the beginning of
    a text. So that they do not do this to a context, a line break, the anchor, is put before it.

    Args:
        spoken: the special tokens that are decoded to their text, as strings; the others are decoded to nothing.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, spoken: frozenset[str] = frozenset()):
        self._tokenizer = tokenizer
        self.special = special_tokens(tokenizer)
        self._silent = frozenset(i for i, token in self.special.items() if token not in spoken)
        self._anchor = self.encode("\n")
        # The special tokens that the tokenizer puts before a text.
        plain, whole = self.encode("a"), list(tokenizer.encode("a"))
        first = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        self.prefix = whole[:first]

    def decode(self, tokens: Sequence[int]) -> str:
        heard = [token for token in tokens if token not in self._silent]
        return str(self._tokenizer.decode(heard, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def context(self, tokens: list[int], first: int, end: int) -> list[int]:
        """Returns the last of ``tokens[first:end]``, from the beginning of a character on. Some decoders treat the
        bytes of several characters as one run, which an incomplete first character would spoil as a whole."""
        most = max(first, end - CONTEXT)
        starts = range(most, max(first, most - MOST_PENDING) - 1, -1)
        contexts = (tokens[start:end] for start in starts)
        return next((c for c in contexts if not self.decode(c).startswith(INCOMPLETE)), tokens[most:end])

    def text_after(self, context: list[int], tokens: list[int]) -> str:
        """Returns the text of ``tokens`` after ``context``; with an empty context, at the beginning of a text."""
        context = self._anchor + context if context else []
        before, whole = self.decode(context), self.decode(context + tokens)
        return whole[len(before) :] if whole.startswith(before) else self.decode(tokens)

    def tokens_after(self, context: list[int], pending: list[int], text: str) -> list[int]:
        """Returns the tokens of ``text`` after ``context``, without the tokens ``pending``, which are known to begin
        it; [] if they cannot begin it. If the last known token and the text would together be encoded differently, the
        text is encoded on its own, which may lower acceptance a little."""
        if not context and not pending:
            return self.encode(text)
        tokens = self._after(context, pending, text)
        if tokens is None:
            tokens = [] if pending else self._after([], [], text)
        return self.encode(text) if tokens is None else tokens

    def _after(self, context: list[int], pending: list[int], text: str) -> list[int] | None:
        """Returns the tokens after the known ones; None if no token ends where the known tokens end."""
        context = self._anchor + context
        known = context + pending
        tokens = self.encode(self.decode(context) + text)
        if tokens[: len(known)] == known:
            return tokens[len(known) :]
        # If the context begins within a word or a character, its first tokens differ.
        shown = self.decode(known)
        ends = (end for end, token in enumerate(tokens, 1) if token == known[-1] and self.decode(tokens[:end]) == shown)
        end = next(ends, None)
        return None if end is None else tokens[end:]


class Translation:
    """The translation of a growing sequence into the tokens of another tokenizer.

    The cost of an update does not depend on the sequence's length, since all tokens but the last ones are settled. The
    result can therefore differ from encoding the whole text at once.

    Attributes:
        tokens: the translation of the sequence, without an incomplete character at its end.
        settled: how many of ``tokens`` will not change any more.
    """

    def __init__(self, source: TokenText, into: TokenText):
        self.source, self.into = source, into
        self.tokens = list(into.prefix)
        self.settled = len(self.tokens)
        self._unsettled_text = ""  # the text of tokens[settled:]
        self._first = self._read = 0  # tokens of the sequence: in the prefix; read so far

    def update(self, sequence: list[int]) -> None:
        """Translates the new tokens of ``sequence``, which must begin with the sequence of the previous call."""
        prefix = self.source.prefix
        if self._read == 0 and sequence[: len(prefix)] == prefix:
            self._first = self._read = len(prefix)
        text = self._next_text(sequence)
        if text:
            self._unsettled_text += text
            context = self.into.context(self.tokens, len(self.into.prefix), self.settled)
            self.tokens[self.settled :] = self.into.tokens_after(context, [], self._unsettled_text)
            if len(self.tokens) - self.settled > SETTLE_AT:
                self._settle(context)

    def back(self, sequence: list[int], more: list[int]) -> list[int]:
        """Translates ``more``, tokens after ``self.tokens``, back into the sequence's own tokens, up to the first
        incomplete character."""
        context = self.into.context(self.tokens, len(self.into.prefix), len(self.tokens))
        text = self.into.text_after(context, more).split(INCOMPLETE)[0]
        if not text:
            return []
        return self.source.tokens_after(self._context(sequence), sequence[self._read :], text)

    def _context(self, sequence: list[int]) -> list[int]:
        return self.source.context(sequence, self._first, self._read)

    def _next_text(self, sequence: list[int]) -> str:
        """Returns the text of the tokens that were not read yet, without an incomplete character at the end."""
        context, count = self._context(sequence), len(sequence)
        for end in range(count, max(self._read, count - MOST_PENDING - 1), -1):
            text = self.source.text_after(context, sequence[self._read : end])
            if not text.endswith(INCOMPLETE):
                self._read = end
                return text
        if count - self._read <= MOST_PENDING:
            return ""
        text = self.source.text_after(context, sequence[self._read :])  # too many tokens for an incomplete character
        self._read = count
        return text

    def _settle(self, context: list[int]) -> None:
        tail = self.tokens[self.settled :]
        for count in range(len(tail) - UNSETTLED, len(tail) - UNSETTLED - MOST_PENDING - 1, -1):
            text = self.into.text_after(context, tail[:count])
            if self._unsettled_text.startswith(text) and not text.endswith(INCOMPLETE):
                self._unsettled_text = self._unsettled_text[len(text) :]
                self.settled += count
                return
        self._unsettled_text, self.settled = "", len(self.tokens)  # the tokenizer changes texts: no safe place


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Returns the tokenizer's special tokens by id."""
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def common_special_tokens(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> frozenset[str]:
    """Returns the special tokens (of a chat, for example) with the same text in both tokenizers, which can therefore be
    translated as text."""
    return frozenset(special_tokens(a).values()) & frozenset(special_tokens(b).values())
