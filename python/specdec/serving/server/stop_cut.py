"""Stop strings as OpenAI's interface has them: the text ends before the first one."""

from __future__ import annotations

from collections.abc import Sequence

from ...detokenize import Detokenizer, IncrementalText


class StopCut:
    """Cuts a text that comes in pieces at its first stop string: the one that is complete first, and the longest of
    those that are complete at the same character. What may still become one is held back. How the text is divided
    into pieces changes nothing.

    Args:
        strings: none of them empty.
        keep: whether the text ends after the stop string rather than before it.

    Attributes:
        found: whether there was a stop string, after which all text is ignored.
    """

    def __init__(self, strings: Sequence[str], keep: bool = False):
        self.found, self._keep = False, keep
        self._strings = list(strings)
        self._fallbacks = [_fallbacks(string) for string in strings]
        self._matched = [0] * len(self._strings)  # how much of each string the end of the text is
        self._held = ""

    def push(self, text: str) -> str:
        """Takes the next text, and returns what is final now."""
        if self.found or not self._strings:
            return "" if self.found else text
        for i, character in enumerate(text):
            if (length := self._match(character)) > 0:
                whole = self._held + text[: i + 1]
                self.found, self._held = True, ""
                return whole if self._keep else whole[: len(whole) - length]
        whole = self._held + text
        final = len(whole) - max(self._matched)
        self._held = whole[final:]
        return whole[:final]

    def finish(self) -> str:
        """What was held back, if the text ends here."""
        held, self._held = self._held, ""
        return held

    def _match(self, character: str) -> int:
        """Returns the length of the longest string that ends with this character, or 0. This is the algorithm of Knuth,
        Morris and Pratt, once for each string."""
        longest = 0
        for k, (string, fallbacks) in enumerate(zip(self._strings, self._fallbacks, strict=True)):
            matched = self._matched[k]
            while matched and string[matched] != character:
                matched = fallbacks[matched]
            matched += string[matched] == character
            self._matched[k] = matched
            if matched == len(string):
                longest = max(longest, matched)
        return longest


def _fallbacks(string: str) -> list[int]:
    """For each length m of a beginning of ``string``: the length of its longest shorter beginning that ends it."""
    found = [0, 0]
    for i in range(1, len(string)):
        matched = found[i]
        while matched and string[matched] != string[i]:
            matched = found[matched]
        found.append(matched + (string[matched] == string[i]))
    return found


class TextStop:
    """Ends one sequence with the token that completes a stop string in the text after its prompt. It reads the text as
    ``DecodedText`` does, so that both always find the same.

    Args:
        detokenizer: of the target.
        prompt: token ids.
        strings: none of them empty.
    """

    def __init__(self, detokenizer: Detokenizer, prompt: Sequence[int], strings: Sequence[str]):
        self._incremental, self._cut = IncrementalText(detokenizer, prompt), StopCut(strings)

    def first_end(self, sequence: int, text: list[int], new: int) -> int | None:
        for kept, token in enumerate(text[len(text) - new :], start=1):
            self._cut.push(self._incremental.push([token]))
            if self._cut.found:
                return kept
        return None
