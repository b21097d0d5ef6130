"""Drafts what followed the longest suffix of a text, in the text itself or in earlier outputs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import takewhile
from threading import Lock

from ..checks import read_count, refuse
from .copying import copy_from, one_hot
from .protocol import Drafts, Generation, Step
from .suffix_automaton import Cursor, SuffixAutomaton


class SuffixMemory:
    """Outputs that later generations of one user draft from. Nobody else's: what is accepted, and how fast, tells
    what is in it, so users who must not learn of each other each get their own.

    Several batches may use it at once. Each sequence drafts from what was there when it began.

    Args:
        max_tokens: of all texts together, >= 1, about 0.5 KB each. Beyond it the oldest texts are forgotten, down to
            half, so that building anew costs each token one more time at most. Of a longer text the end is kept.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """

    def __init__(self, max_tokens: int = 100_000):
        self.max_tokens = read_count("max_tokens", max_tokens, 1)
        self.reading = Lock()  # held by who reads the automaton, and while it grows
        self._writing = Lock()  # held by who adds: building anew takes long, and nobody reads a new automaton
        self._texts: deque[list[int]] = deque()
        self._size = 0
        self._automaton = SuffixAutomaton()

    def __len__(self) -> int:
        """Tokens in it."""
        return self._size

    def add(self, texts: Iterable[Sequence[int]]) -> None:
        """Remembers texts, lists of token ids. Generations that run already do not see them."""
        with self._writing:
            for text in texts:
                kept = list(text[-self.max_tokens :])
                if kept:
                    self._add(kept)

    def _add(self, text: list[int]) -> None:
        self._texts.append(text)
        self._size += len(text)
        if self._size <= self.max_tokens:
            with self.reading:
                self._append(self._automaton, text)
            return
        while self._size > self.max_tokens // 2 and len(self._texts) > 1:
            self._size -= len(self._texts.popleft())
        automaton = SuffixAutomaton()
        for kept in self._texts:
            self._append(automaton, kept)
        self._automaton = automaton  # generations keep the one that they started with

    @staticmethod
    def _append(automaton: SuffixAutomaton, text: list[int]) -> None:
        automaton.extend(text)
        automaton.separate()

    def cursors(self, count: int) -> list[Cursor]:
        """For the sequences of a generation; to be used with ``reading`` held."""
        with self.reading:
            return [Cursor(self._automaton) for _ in range(count)]


class SuffixDrafter:
    """Suffix decoding: the longest suffix of the text that stood before in prompt or output, or stands in an earlier
    output, proposes what followed there; the longer of the two matches, at equal lengths the text's own and most
    recent one. Found by suffix automata (SAM-Decoding, Hu et al., arXiv 2411.10666) in amortised O(1) a token, for
    matches of any length.

    A proposal has at most ``max_spec_factor`` times as many tokens as its match (SuffixDecoding, Oliaro et al.,
    arXiv 2411.04975): where little agrees, little is risked. On Python source, K = 8, the defaults give a tau of 1.54
    for 2.3 drafts a step; without the factor, ``min_match=2`` gives 1.42 for as many, and ``min_match=1`` 1.59 for 5.9.

    The drafts are a function of text and memory, so q is one-hot and the distribution is kept. With a memory, *which*
    text is drawn with a seed depends on what was decoded before under the rules ``token`` and ``block``; greedy texts
    and those of ``coupled`` do not, and without a memory none do.

    Args:
        memory: earlier outputs to draft from, to which finished outputs are added; None: prompt and output alone.
            Drafters share a memory that both are given, and nothing else.
        min_match: tokens that have to agree before anything is proposed, >= 1.
        max_spec_factor: > 0; math.inf: no limit but K.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """

    def __init__(self, memory: SuffixMemory | None = None, min_match: int = 1, max_spec_factor: float = 2.0):
        if memory is not None and not isinstance(memory, SuffixMemory):
            refuse("memory", type(memory).__name__, "a SuffixMemory or None")
        read_count("min_match", min_match, 1)
        number = isinstance(max_spec_factor, (int, float)) and not isinstance(max_spec_factor, bool)
        if not number or math.isnan(max_spec_factor) or max_spec_factor <= 0:
            refuse("max_spec_factor", repr(max_spec_factor), "a number > 0")
        self.memory, self.min_match, self.max_spec_factor = memory, min_match, max_spec_factor

    def start(self, generation: Generation) -> SuffixSession:
        return SuffixSession(self, generation)


class SuffixSession:
    """Every sequence's own automaton, and its place in the memory's; one that does not draft in a step catches up
    later."""

    def __init__(self, drafter: SuffixDrafter, generation: Generation):
        self.drafter, memory, self.stopwatch = drafter, drafter.memory, generation.stopwatch
        self.own = [SuffixAutomaton() for _ in range(generation.size)]
        self.past: list[Cursor | None] = [None] * generation.size
        self.reading = nullcontext() if memory is None else memory.reading

    def admit(self, prompts: Mapping[int, list[int]]) -> None:
        cursors = [None] * len(prompts) if self.drafter.memory is None else self.drafter.memory.cursors(len(prompts))
        for (row, prompt), cursor in zip(prompts.items(), cursors, strict=True):
            self.own[row], self.past[row] = SuffixAutomaton(prompt), cursor
        self.stopwatch.lap("prefill")

    def draft(self, step: Step) -> Drafts:
        for own, text, most in zip(self.own, step.texts, step.allowed, strict=True):
            if most:
                own.extend(text[len(own) :])
        sequences = zip(self.own, self.past, step.texts, step.allowed, strict=True)
        with self.reading:
            proposals = [self._propose(*sequence) if sequence[-1] else [] for sequence in sequences]
        return one_hot(proposals, step.last_two.device)

    def _propose(self, own: SuffixAutomaton, past: Cursor | None, text: list[int], most: int) -> list[int]:
        (length, end), tokens = own.longest_earlier_suffix(), own.tokens
        if past is not None:
            past.follow(text[past.followed :])
            longest, there = past.longest_suffix()
            if longest > length and past.tokens[there] >= 0:
                length, end, tokens = longest, there, past.tokens
        if length < self.drafter.min_match:
            return []
        most = max(1, int(min(most, self.drafter.max_spec_factor * length)))
        # A memory's text ends in a separator: nothing is proposed past it.
        return list(takewhile(lambda token: token >= 0, copy_from(tokens, end, most)))

    def release(self, row: int, output: list[int]) -> None:
        self.own[row], self.past[row] = SuffixAutomaton(), None
        if self.drafter.memory is not None:
            self.drafter.memory.add([output])
