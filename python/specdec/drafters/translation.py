"""One tokenizer's tokens in those of another: text in between, encoded again only where it may still change."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

CONTEXT = 8  # tokens on the left with which text is decoded and encoded
UNSETTLED = 16  # tokens at the end that more text may change
SETTLE_AT = 64  # tokens at the end that are encoded again in every step, at most
INCOMPLETE = "\ufffd"  # what a decoder shows for bytes that are no character
MOST_PENDING = 3  # tokens that can be the beginning of one character: it has up to four bytes


class TokenText:
    """What a tokenizer's tokens read as after others, and back. What tokenizers do at the beginning of a text (drop a
    space, add one) they must not do to a context: a line break, as an anchor, stands before it.

    Args:
        spoken: the special tokens that have a text, as strings; the others have none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, spoken: frozenset[str] = frozenset()):
        self._tokenizer = tokenizer
        self.special = special_tokens(tokenizer)
        self._silent = frozenset(i for i, token in self.special.items() if token not in spoken)
        self._anchor = self.encode("\n")
        # What the tokenizer itself puts before a text.
        plain, whole = self.encode("a"), list(tokenizer.encode("a"))
        first = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        self.prefix = whole[:first]

    def decode(self, tokens: Sequence[int]) -> str:
        heard = [token for token in tokens if token not in self._silent]
        return str(self._tokenizer.decode(heard, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def context(self, tokens: list[int], first: int, end: int) -> list[int]:
        """The last of ``tokens[first:end]``, from the beginning of a character on: bytes that begin within one spoil
        all that follow, where a decoder sees several characters of bytes as one run."""
        most = max(first, end - CONTEXT)
        starts = range(most, max(first, most - MOST_PENDING) - 1, -1)
        contexts = (tokens[start:end] for start in starts)
        return next((c for c in contexts if not self.decode(c).startswith(INCOMPLETE)), tokens[most:end])

    def text_after(self, context: list[int], tokens: list[int]) -> str:
        """The text of ``tokens`` where they follow ``context``; without one they begin the text."""
        context = self._anchor + context if context else []
        before, whole = self.decode(context), self.decode(context + tokens)
        return whole[len(before) :] if whole.startswith(before) else self.decode(tokens)

    def tokens_after(self, context: list[int], pending: list[int], text: str) -> list[int]:
        """The tokens of ``text`` where it follows ``context``, without the first ones, ``pending``, which are known: []
        where they cannot begin it. Where the last known token and the text would be other tokens together, they are
        parted: that may cost a little acceptance."""
        if not context and not pending:
            return self.encode(text)
        tokens = self._after(context, pending, text)
        if tokens is None:
            tokens = [] if pending else self._after([], [], text)
        return self.encode(text) if tokens is None else tokens

    def _after(self, context: list[int], pending: list[int], text: str) -> list[int] | None:
        """None where no token ends between what is known and what is not."""
        context = self._anchor + context
        known = context + pending
        tokens = self.encode(self.decode(context) + text)
        if tokens[: len(known)] == known:
            return tokens[len(known) :]
        # The context may begin within a word or a character: then its first tokens differ.
        shown = self.decode(known)
        ends = (end for end, token in enumerate(tokens, 1) if token == known[-1] and self.decode(tokens[:end]) == shown)
        end = next(ends, None)
        return None if end is None else tokens[end:]


class Translation:
    """One sequence, which grows, in the tokens of another tokenizer.

    The cost of an update does not depend on how long the sequence is: all but the last tokens are settled, which may
    differ from encoding the whole text at once.

    Attributes:
        tokens: the translation, of all of the sequence but the beginning of a character at its end.
        settled: how many of them will not change.
    """

    def __init__(self, source: TokenText, into: TokenText):
        self.source, self.into = source, into
        self.tokens = list(into.prefix)
        self.settled = len(self.tokens)
        self._unsettled_text = ""  # that of tokens[settled:]
        self._first = self._read = 0  # the sequence's tokens that are a prefix; those that were read

    def update(self, sequence: list[int]) -> None:
        """``sequence``: as in the last call, and more."""
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
        """The sequence's own tokens for ``more`` after ``tokens``, as far as they are whole characters."""
        context = self.into.context(self.tokens, len(self.into.prefix), len(self.tokens))
        text = self.into.text_after(context, more).split(INCOMPLETE)[0]
        if not text:
            return []
        return self.source.tokens_after(self._context(sequence), sequence[self._read :], text)

    def _context(self, sequence: list[int]) -> list[int]:
        return self.source.context(sequence, self._first, self._read)

    def _next_text(self, sequence: list[int]) -> str:
        """The text of what was not read yet, but for the beginning of a character at its end."""
        context, count = self._context(sequence), len(sequence)
        for end in range(count, max(self._read, count - MOST_PENDING - 1), -1):
            text = self.source.text_after(context, sequence[self._read : end])
            if not text.endswith(INCOMPLETE):
                self._read = end
                return text
        if count - self._read <= MOST_PENDING:
            return ""
        text = self.source.text_after(context, sequence[self._read :])  # no beginning of anything
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
        self._unsettled_text, self.settled = "", len(self.tokens)  # the tokenizer changes texts: no place is known


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """By id."""
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def common_special_tokens(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> frozenset[str]:
    """The special tokens (those of a chat, say) that two tokenizers write alike, and so can be handed over as text."""
    return frozenset(special_tokens(a).values()) & frozenset(special_tokens(b).values())
