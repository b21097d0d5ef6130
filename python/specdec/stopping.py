"""What ends a sequence besides end-of-sequence tokens and its length: stop strings, or other criteria."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .checks import refuse
from .detokenize import INCOMPLETE, Detokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EMPTY = 64  # tokens without text that a string may go across


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

    What counts is the text that the tokenizer decodes, special tokens included: a string may begin or end inside of a
    token, begin in the prompt, and name a special token. With vocabularies of bytes and characters that is the token at
    which transformers' ``StopStringCriteria`` ends, which reads tokens one by one and cannot read those of words. A
    step costs one decoding of some tokens, however long the text is.

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
        if not callable(getattr(tokenizer, "decode", None)):
            refuse("tokenizer", type(tokenizer).__name__, "the target's tokenizer, which stop strings need")
        self._detokenizer = Detokenizer(tokenizer, hidden=())
        self._longest = max(map(len, self.strings))

    def first_end(self, sequence: int, text: list[int], new: int) -> int | None:
        """Returns how many of the last ``new`` tokens of ``text`` are kept; None: no string ends in them."""
        known, decode = len(text) - new, self._detokenizer.decode
        start, whole = self._window(text, known)
        # The first byte of a character can make a run of bytes invalid, and with it what was a text.
        has_bytes = any(self._detokenizer.byte(token) is not None for token in text[known:])
        if not has_bytes and not any(string in whole for string in self.strings):
            return None
        before = decode(text[start:known])  # the prompt may have had it already
        ends = (n for n in range(1, new + 1) if self._ends_after(before, decode(text[start : known + n])))
        return next(ends, None)

    def _window(self, text: list[int], known: int) -> tuple[int, str]:
        """Decodes the end of a text, of which a string may be a part that ends after the first ``known`` tokens, and
        returns where that begins, too."""
        new = sum(len(self._detokenizer.decode([token])) + 1 for token in text[known:])  # it may lack its space
        count = self._longest // 2 + 2
        while True:
            start = self._detokenizer.window(text, max(known - count, 0))
            whole = self._detokenizer.decode(text[start:]).rstrip(INCOMPLETE)
            first = len(self._detokenizer.decode(text[start : start + 1]))  # which may lack its space, too
            if start == 0 or len(whole) - first - new >= self._longest - 1 or count > 8 * self._longest + _EMPTY:
                return start, whole
            count *= 2

    def _ends_after(self, before: str, whole: str) -> bool:
        """Whether a string ends in what ``whole`` has after ``before``, or otherwise."""
        before, whole = before.rstrip(INCOMPLETE), whole.rstrip(INCOMPLETE)
        same = len(before) if whole.startswith(before) else len(os.path.commonprefix([before, whole]))
        return any(whole.find(string, max(same - len(string) + 1, 0)) >= 0 for string in self.strings)


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
