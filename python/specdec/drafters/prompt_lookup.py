"""Drafts the tokens that followed the previous occurrence of the last few tokens in the same sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..checks import read_count, refuse
from .copying import Branches, as_trees, copy_from, until_end
from .protocol import BatchState, Copies, Drafter, Drafts, DraftSession, Step, Votes


class PromptLookupDrafter(Drafter):
    """Prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; transformers'
    ``prompt_lookup_num_tokens``). It needs no model and keeps no state beyond a batch. It is useful where outputs
    repeat their input, as in editing, summaries and extraction.

    The longest n-gram that ends the text and also occurs earlier in it, in prompt or output, is looked up. The drafts
    are the tokens that followed its most recent earlier occurrence, up to an end-of-sequence token. They are a function
    of the text, so q is one-hot and the distribution is unchanged.

    A tree has the continuations of several earlier occurrences: those of the longest n-gram first, of these the most
    recent first.

    The defaults are the best of those tried on Python source, K = 4 to 12, where a draft costs 5 % of a step. Single
    tokens give more drafts, but most of these are rejected; n = 3 alone, as in the original, finds old versions of
    text that has been edited since.

    Args:
        max_ngram: tokens of the longest n-gram that is looked up, >= 1. Each n costs about 80 bytes a token.
        min_ngram: tokens of the shortest one, 1 to ``max_ngram``.

    Raises:
        ValueError: names the argument, what was given and what is allowed.

    Example:
        >>> from specdec import PromptLookupDrafter, SpeculativeDecoder, load_embedded_pair
        >>> target, _, tokenizer = load_embedded_pair()
        >>> decoder = SpeculativeDecoder(target, PromptLookupDrafter(), num_drafts=4)
        >>> decoder.generate([tokenizer("x = [1, 2, 3, 1, 2, 3, 1, 2, 3,").input_ids], max_new_tokens=16).stats.tau > 1
        True
    """

    copying = trees = True

    def __init__(self, max_ngram: int = 5, min_ngram: int = 2):
        read_count("max_ngram", max_ngram, 1)
        if isinstance(min_ngram, bool) or not isinstance(min_ngram, int) or not 1 <= min_ngram <= max_ngram:
            refuse("min_ngram", repr(min_ngram), f"an integer from 1 to max_ngram={max_ngram}")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def start(self, batch: BatchState) -> PromptLookupSession:
        return PromptLookupSession(range(self.min_ngram, self.max_ngram + 1), batch)


class PromptLookupSession(DraftSession):
    """One index for each sequence. A sequence that does not draft in a step is indexed at its next drafts."""

    def __init__(self, sizes: range, batch: BatchState):
        self.sizes, self.nodes = sizes, batch.nodes
        self.timer, self.ends = batch.timer, batch.ends
        self.indexes = [self._new() for _ in range(batch.size)]

    def _new(self) -> NgramIndex:
        return NgramIndex(self.sizes, several=self.nodes > 0)

    def begin(self, prompts: Mapping[int, list[int]]) -> None:
        for row, prompt in prompts.items():
            self.indexes[row] = self._new()
            self.indexes[row].update(prompt)
        self.timer.lap("prefill")

    def propose(self, step: Step) -> Drafts | Copies:
        return self._trees(step) if self.nodes else Copies.of(self._propose, step)

    def _propose(self, row: int, text: list[int], most: int) -> tuple[list[int], int, Votes]:
        tokens, matched = self.indexes[row].propose(text, most)
        return until_end(tokens, self.ends[row]), matched, Votes.UNKNOWN

    def _trees(self, step: Step) -> Drafts:
        trees = []
        for row, (text, most) in enumerate(zip(step.texts, step.allowed, strict=True)):
            tree = Branches(self.nodes if most else 0, self.ends[row])
            if most:
                self.indexes[row].branch(text, most, tree)
            trees.append(tree)
        return as_trees(trees, step.last_two.device)

    def end(self, row: int, output: list[int]) -> None:
        self.indexes[row] = self._new()


class NgramIndex:
    """The position after the most recent occurrence of each n-gram of a growing text, for each n of ``sizes``,
    ascending. A new token costs one entry for each n.

    Args:
        several: earlier occurrences are kept as well, for ``branch``; one more entry for each n.
    """

    def __init__(self, sizes: range, several: bool = False):
        self._ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in sizes}
        self._before: dict[int, dict[int, int]] = {n: {} for n in sizes}  # an occurrence's end -> the earlier one's
        self._known, self._several = 0, several

    def update(self, text: list[int]) -> None:
        """Adds the n-grams of ``text`` except those at its end, which have no token after them yet."""
        first, known = self._known, len(text)
        for n, ends in self._ends.items():
            before = self._before[n]
            for end in range(max(first, n), known):
                ngram = tuple(text[end - n : end])
                if self._several and ngram in ends:
                    before[end] = ends[ngram]
                ends[ngram] = end
        self._known = known

    def propose(self, text: list[int], most: int) -> tuple[list[int], int]:
        """Returns ``most`` >= 1 drafts after ``text``, and how many tokens match; ([], 0) without a match. ``text``
        must begin with the text of the previous call."""
        self.update(text)
        place, matched = None, 0
        for n, ends in self._ends.items():
            end = ends.get(tuple(text[-n:]))
            if end is None:
                break  # then no longer n-gram occurred before, either
            place, matched = end, n
        return ([] if place is None else copy_from(text, place, most)), matched

    def branch(self, text: list[int], most: int, tree: Branches) -> None:
        """Adds continuations of up to ``most`` tokens to ``tree`` until it is full, or as many as it may have nodes
        have been looked at. As for ``propose``, ``text`` must begin with the text of the previous call."""
        self.update(text)
        for end, _ in zip(self._occurrences(text), range(tree.most), strict=False):
            tree.add(copy_from(text, end, most))
            if tree.full:
                return

    def _occurrences(self, text: list[int]) -> Iterator[int]:
        """Yields where the last tokens of ``text`` occurred before, by the longest n-gram first, the most recent
        first."""
        seen = set()
        for n in sorted(self._ends, reverse=True):
            end = self._ends[n].get(tuple(text[-n:]))
            while end is not None:
                if end not in seen:
                    seen.add(end)
                    yield end
                end = self._before[n].get(end)
