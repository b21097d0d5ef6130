"""A suffix automaton, which finds every substring of a growing text. ``csrc/drafters`` has it in C++."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence

try:
    native = importlib.import_module("specdec.drafters._C")
except ImportError as error:
    raise ImportError("specdec.drafters._C is not built here: pip install builds it (README.md)") from error


ANY = 2**31 - 1  # tokens of a suffix, where its length has no limit


class SuffixAutomaton:
    """A suffix automaton built online (Blumer et al. 1985, "The smallest automaton recognizing the subwords of a
    text"): amortised O(1) time, about 0.1 microseconds, and 0.1 KB a token. A state stands for all substrings that end
    at the same places of the text.

    Tokens are integers of 32 bits, >= 0. Negative ones separate texts (:meth:`separate`). Each separator is used only
    once, so no substring that occurs twice contains one.
    """

    def __init__(self, tokens: Iterable[int] = ()):
        self._native, self._size, self._separators = native.new_automaton(), 0, 0
        self.extend(tokens)

    def __len__(self) -> int:
        """Returns the number of tokens and separators."""
        return self._size

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends ``tokens`` to the text."""
        added = list(tokens)
        native.extend(self._native, added)
        self._size += len(added)

    def separate(self) -> None:
        """Ends a text: tokens that are appended later belong to another text."""
        self._separators += 1
        self.extend([-self._separators])

    def longest_suffix(self) -> tuple[int, int]:
        """Returns (length, end): the length of the longest suffix of the text that also occurs earlier, and the index
        of the token after its most recent earlier occurrence. (0, 0): the last token is new. In a periodic text with
        more than 32 links, ``end`` may belong to an occurrence before the most recent one."""
        _, length, end = native.longest_earlier(self._native)
        return length, end

    def look(
        self, text: list[int], least: int, longest: int, factor: float, most: int
    ) -> tuple[list[int], int, tuple[int, int]]:
        """Reads on in ``text``, which begins with this text, and finds the longest suffix, of up to ``longest`` tokens,
        that also occurs earlier.

        Returns:
            The tokens that followed it: up to ``most``, and up to ``factor`` for each one of the suffix, rounded down,
            but one at least, as :meth:`copied` has them. The suffix's length. How often the last token occurred
            earlier, and how often the first of the returned tokens followed it (of occurrences at the end of the text,
            and of those in a long period, not all are counted). ([], 0, (0, 0)): the suffix is shorter than ``least``.
        """
        found = native.look(self._native, text, least, longest, factor, most)
        self._size = max(self._size, len(text))
        return found

    def suffixes(self, least: int, longest: int, most: int) -> list[tuple[int, int]]:
        """Returns (length, state) of up to ``most`` suffixes of the text, of ``least`` to ``longest`` tokens, that also
        occur earlier, the longest first. Those between two of these lengths occur as often as the longer one."""
        state, length, _ = native.longest_earlier(self._native)
        return native.suffixes(self._native, state, length, least, longest, most)

    def following(self, state: int) -> list[tuple[int, int, int]]:
        """Returns (token, state, count) of each token that follows the substrings of ``state``: the state of these
        substrings with the token, and how often that occurred. At the end of the text they are what follows its longest
        earlier suffix, as a text with a period goes on."""
        return native.following(self._native, state, self._size)

    def copied(self, start: int, count: int) -> list[int]:
        """Returns up to ``count`` tokens from ``start`` < len(self) on, up to a separator. A copy that reaches the end
        continues with the tokens that it has copied, as in LZ77, so a periodic text is continued periodically."""
        return native.copied(self._native, start, count)


class Cursor:
    """Reads another text token by token, and finds its longest suffix that occurs in ``automaton``'s text, in
    amortised O(1) a token.

    Only the automaton's text of the time of construction counts, even if it grows later. It must not grow *while* a
    method of the cursor runs.
    """

    def __init__(self, automaton: SuffixAutomaton):
        self.followed = 0  # tokens of the other text that were read
        self._native, self._limit = automaton._native, len(automaton)
        self._state = self._matched = self._end = 0
        self.copied = automaton.copied

    def follow(self, tokens: Sequence[int]) -> None:
        """Reads the next tokens of the other text."""
        place = self._state, self._matched, self._limit
        self._state, self._matched, self._end = native.follow(self._native, *place, list(tokens))
        self.followed += len(tokens)

    def longest_suffix(self) -> tuple[int, int]:
        """Returns (length, end): the length of the longest suffix of the text read so far that occurs in the
        automaton's, and the index after its first occurrence there. (0, 0): none occurs."""
        return self._matched, self._end

    def suffixes(self, least: int, longest: int, most: int) -> list[tuple[int, int]]:
        """As those of an automaton, of the text read so far: its suffixes that occur in the automaton's."""
        return native.suffixes(self._native, self._state, self._matched, least, longest, most)

    def following(self, state: int) -> list[tuple[int, int, int]]:
        """As an automaton's. What came after the time of construction does not follow, but is counted."""
        return native.following(self._native, state, self._limit)
