"""A suffix automaton: finds every substring of a growing text, and where it occurred."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

_ROOT = 0
_RECENT = 32  # most links that are followed for each token to update where substrings ended last


class SuffixAutomaton:
    """A suffix automaton built online (Blumer et al. 1985, "The smallest automaton recognizing the subwords of a
    text"): amortised O(1) time and at most two states a token, about 0.5 KB.

    A state stands for all substrings that end at the same places of the text. They are suffixes of each other, with
    lengths from ``_length[link] + 1`` to ``_length[state]``; the state's link leads to the next shorter suffix, which
    also ends elsewhere. The states on the path of links from the last state stand for the suffixes of the whole text,
    so the first link leads to the longest suffix that occurred in the text before.

    Two of the places where a state's substrings end are stored. The first one never changes, so it tells whether a
    substring occurred when the text was still shorter (:class:`Cursor`). The last one would have to change with every
    token for every suffix of the text. Only 32 links are followed, so that the time stays O(1). Source code has fewer
    (1.4 on average, at most 19 in 63,000 tokens); ``aaa...`` has more. How often a state's substrings occurred is
    counted in the same way.

    Tokens are integers >= 0. Negative ones separate texts (:meth:`separate`). Each separator is used only once, so no
    substring that occurs twice contains one.
    """

    def __init__(self, tokens: Iterable[int] = ()):
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._first_end = [0]
        self._last_end = [0]
        self._count = [0]
        self._last = _ROOT
        self._separators = 0
        self.extend(tokens)

    def __len__(self) -> int:
        """Returns the number of tokens and separators."""
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends ``tokens`` to the text."""
        text, transitions, link, length = self.tokens, self._next, self._link, self._length
        first_end, last_end, count = self._first_end, self._last_end, self._count
        last = self._last
        for token in tokens:
            # Suffixes that end here become earlier occurrences only now, as a token follows them.
            end, state = len(text), link[last]
            for _ in range(_RECENT):
                if state <= _ROOT:
                    break
                last_end[state] = end
                count[state] += 1
                state = link[state]
            text.append(token)
            new = len(transitions)
            transitions.append({})
            length.append(end + 1)
            first_end.append(end + 1)
            last_end.append(end + 1)
            count.append(1)
            state = last
            last = new
            # Adds a transition to the suffixes that this token had never followed before.
            while state != -1 and token not in transitions[state]:
                transitions[state][token] = new
                state = link[state]
            if state == -1:
                link.append(_ROOT)
                continue
            old = transitions[state][token]
            if length[old] == length[state] + 1:
                link.append(old)
                continue
            # ``old`` also stands for longer substrings, which do not end here, so the shorter ones get a new state.
            split = new + 1
            link.append(split)
            transitions.append(transitions[old].copy())
            length.append(length[state] + 1)
            first_end.append(first_end[old])
            last_end.append(last_end[old])
            count.append(count[old])
            link.append(link[old])
            link[old] = split
            while state != -1 and transitions[state].get(token) == old:
                transitions[state][token] = split
                state = link[state]
        self._last = last

    def separate(self) -> None:
        """Ends a text: tokens that are appended later belong to another text."""
        self._separators += 1
        self.extend([-self._separators])

    def longest_earlier_suffix(self) -> tuple[int, int]:
        """Returns (length, end): the length of the longest suffix of the text that also occurs earlier, and the index
        of the token after its most recent earlier occurrence. (0, 0): the last token is new. In a periodic text with
        more than 32 links, ``end`` may belong to an occurrence before the most recent one."""
        state = self._link[self._last]
        return (0, 0) if state <= _ROOT else (self._length[state], self._last_end[state])

    def suffixes(self) -> Iterator[tuple[int, int]]:
        """Yields (length, state) of suffixes of the text that also occur earlier, the longest first. Those between two
        of these lengths occur as often as the longer one."""
        return _suffixes(self, self._link[self._last])

    def following(self, state: int) -> list[tuple[int, int, int]]:
        """Returns (token, state, count) of each token that follows the substrings of ``state``: the state of these
        substrings with the token, and how often that occurred. At the end of the text they are what follows its longest
        earlier suffix, as a text with a period goes on."""
        if state == self._last:
            state = self._link[state]
        if state <= _ROOT:
            return []
        return [(token, after, self._count[after]) for token, after in self._next[state].items() if token >= 0]


def _suffixes(automaton: SuffixAutomaton, state: int) -> Iterator[tuple[int, int]]:
    while state > _ROOT:
        yield automaton._length[state], state
        state = automaton._link[state]


class Cursor:
    """Reads another text token by token, and finds its longest suffix that occurs in ``automaton``'s text, in
    amortised O(1) a token.

    Only the automaton's text of the time of construction counts, even if it grows later. It must not grow *while* a
    method of the cursor runs.
    """

    def __init__(self, automaton: SuffixAutomaton):
        self.tokens = automaton.tokens
        self.followed = 0  # tokens of the other text that were read
        self._automaton, self._limit = automaton, len(automaton)
        self._state, self._matched = _ROOT, 0

    def follow(self, tokens: Sequence[int]) -> None:
        """Reads the next tokens of the other text."""
        transitions, link, length = self._automaton._next, self._automaton._link, self._automaton._length
        first_end, limit, state, matched = self._automaton._first_end, self._limit, self._state, self._matched
        # ``_state`` stays valid when the automaton has split it since: only ends up to the limit count here, and up to
        # the limit both parts end at the same places.
        for token in tokens:
            while True:
                longer = transitions[state].get(token)
                if longer is not None and first_end[longer] <= limit:
                    state, matched = longer, matched + 1
                    break
                if state == _ROOT:
                    break
                state = link[state]
                matched = length[state]
        self._state, self._matched = state, matched
        self.followed += len(tokens)

    def longest_suffix(self) -> tuple[int, int]:
        """Returns (length, end): the length of the longest suffix of the text read so far that occurs in ``tokens``,
        and the index after its first occurrence there. (0, 0): none occurs."""
        return self._matched, self._automaton._first_end[self._state]

    def suffixes(self) -> Iterator[tuple[int, int]]:
        """As those of an automaton, of the text read so far: its suffixes that occur in ``tokens``."""
        if self._state != _ROOT:
            yield self._matched, self._state
            yield from _suffixes(self._automaton, self._automaton._link[self._state])

    def following(self, state: int) -> list[tuple[int, int, int]]:
        """As an automaton's. What came after the time of construction does not follow, but is counted."""
        following, first_end = self._automaton._next[state].items(), self._automaton._first_end
        counts = self._automaton._count
        return [(t, after, counts[after]) for t, after in following if t >= 0 and first_end[after] <= self._limit]
