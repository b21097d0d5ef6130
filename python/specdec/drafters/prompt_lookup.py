"""Drafts the tokens that followed the previous occurrence of the last few tokens in the same sequence."""

from __future__ import annotations

from collections.abc import Mapping

from ..checks import read_count, refuse
from .copying import copy_from, one_hot
from .protocol import Drafts, Generation, Step


class PromptLookupDrafter:
    """Prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; transformers'
    ``prompt_lookup_num_tokens``). It needs no model and keeps no state beyond a generation. It is useful where outputs
    repeat their input, as in editing, summaries and extraction.

    The longest n-gram that ends the text and also occurs earlier in it, in prompt or output, is looked up. The drafts
    are the tokens that followed its most recent earlier occurrence, up to an end-of-sequence token. They are a function
    of the text, so q is one-hot and the distribution is unchanged.

    The defaults are the best of those tried on Python source, K = 4 to 12, where a draft costs 5 % of a step. Single
    tokens give more drafts, but most of these are rejected; n = 3 alone, as in the original, finds old versions of
    text that has been edited since.

    Args:
        max_ngram: tokens of the longest n-gram that is looked up, >= 1. Each n costs about 80 bytes a token.
        min_ngram: tokens of the shortest one, 1 to ``max_ngram``.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """

    def __init__(self, max_ngram: int = 5, min_ngram: int = 2):
        read_count("max_ngram", max_ngram, 1)
        if isinstance(min_ngram, bool) or not isinstance(min_ngram, int) or not 1 <= min_ngram <= max_ngram:
            refuse("min_ngram", repr(min_ngram), f"an integer from 1 to max_ngram={max_ngram}")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def start(self, generation: Generation) -> PromptLookupSession:
        return PromptLookupSession(range(self.min_ngram, self.max_ngram + 1), generation)


class PromptLookupSession:
    """One index for each sequence. A sequence that does not draft in a step is indexed at its next drafts."""

    def __init__(self, sizes: range, generation: Generation):
        self.sizes, self.stopwatch, self.ends = sizes, generation.stopwatch, generation.ends
        self.indexes = [NgramIndex(sizes) for _ in range(generation.size)]

    def admit(self, prompts: Mapping[int, list[int]]) -> None:
        for row, prompt in prompts.items():
            self.indexes[row] = NgramIndex(self.sizes)
            self.indexes[row].update(prompt)
        self.stopwatch.lap("prefill")

    def draft(self, step: Step) -> Drafts:
        sequences = zip(self.indexes, step.texts, step.allowed, strict=True)
        proposals = [index.propose(text, most) if most else [] for index, text, most in sequences]
        return one_hot(proposals, self.ends, step.last_two.device)

    def release(self, row: int, output: list[int]) -> None:
        self.indexes[row] = NgramIndex(self.sizes)


class NgramIndex:
    """The position after the most recent occurrence of each n-gram of a growing text, for each n of ``sizes``,
    ascending. A new token costs one entry for each n."""

    def __init__(self, sizes: range):
        self._ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in sizes}
        self._known = 0

    def update(self, text: list[int]) -> None:
        """Adds the n-grams of ``text`` except those at its end, which have no token after them yet."""
        first, known = self._known, len(text)
        for n, ends in self._ends.items():
            for end in range(max(first, n), known):
                ends[tuple(text[end - n : end])] = end
        self._known = known

    def propose(self, text: list[int], most: int) -> list[int]:
        """Returns ``most`` >= 1 drafts after ``text``, or [] without a match. ``text`` must begin with the text of the
        previous call."""
        self.update(text)
        found = None
        for n, ends in self._ends.items():
            end = ends.get(tuple(text[-n:]))
            if end is None:
                break  # then no longer n-gram occurred before, either
            found = end
        return [] if found is None else copy_from(text, found, most)
