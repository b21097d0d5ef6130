"""Drafts the tokens that followed the longest suffix of a text, in the text itself or in earlier outputs."""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock

from ..checks import read_count, refuse
from .copying import Branches, as_trees, until_end
from .protocol import BatchState, Copies, Drafter, Drafts, DraftSession, Step, Votes
from .suffix_automaton import ANY, Cursor, SuffixAutomaton
from .suffix_branches import branch


class SuffixMemory:
    """Earlier outputs, from which later generations of the same user draft. Acceptance and speed reveal what is in a
    memory, so users who must not learn of each other's texts need separate memories.

    Several batches may use it at once. Each sequence drafts from the texts that were there when it began.

    Args:
        max_tokens: the most tokens of all texts together, >= 1, at about 0.1 KB each. Beyond it the oldest texts are
            removed until half is left, so that a token is indexed again at most once on average. Of a longer text only
            the end is kept.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """

    def __init__(self, max_tokens: int = 100_000):
        self.max_tokens = read_count("max_tokens", max_tokens, 1)
        self.reading = Lock()  # held while the automaton is read, and while it grows
        self._writing = Lock()  # held while texts are added; a rebuild takes long, but does not block readers
        self._texts: deque[array] = deque()
        self._size = 0
        self._automaton = SuffixAutomaton()

    def __len__(self) -> int:
        """Returns the number of tokens in the memory."""
        return self._size

    def add(self, texts: Iterable[Sequence[int]]) -> None:
        """Adds texts, given as lists of token ids. Sequences that have already begun do not draft from them."""
        with self._writing:
            for text in texts:
                try:
                    kept = array("i", text[-self.max_tokens :])
                except (TypeError, OverflowError) as error:
                    refuse("texts", f"{error}", "lists of token ids")
                if kept:
                    self._add(kept)

    def _add(self, text: array) -> None:
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
        self._automaton = automaton  # running sequences keep the automaton that they began with

    @staticmethod
    def _append(automaton: SuffixAutomaton, text: array) -> None:
        automaton.extend(text)
        automaton.separate()

    def cursor(self) -> Cursor:
        """Returns the cursor of a new sequence. Hold ``reading`` while using it."""
        with self.reading:
            return Cursor(self._automaton)


class SuffixMemories:
    """A memory for each owner of requests (``Request.owner``), such as a user or a key of a server. Drafts, and so
    acceptance and speed, depend on the earlier texts of a request's own owner only. A request without an owner has no
    memory.

    Batches and threads may share it.

    Args:
        max_tokens: of each memory, as in :class:`SuffixMemory`.
        max_owners: how many owners have a memory, >= 1. The memory of the one whose last request began first is
            forgotten.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """

    def __init__(self, max_tokens: int = 100_000, max_owners: int = 16):
        self.max_tokens = read_count("max_tokens", max_tokens, 1)
        self.max_owners = read_count("max_owners", max_owners, 1)
        self._changing = Lock()
        self._memories: OrderedDict[Hashable, SuffixMemory] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of owners that have a memory."""
        return len(self._memories)

    def of(self, owner: Hashable) -> SuffixMemory | None:
        """Returns the owner's memory, which is new if it has none; None for ``owner`` None."""
        if owner is None:
            return None
        with self._changing:
            memory = self._memories.setdefault(owner, SuffixMemory(self.max_tokens))
            self._memories.move_to_end(owner)
            if len(self._memories) > self.max_owners:
                self._memories.popitem(last=False)
        return memory


class SuffixDrafter(Drafter):
    """Suffix decoding: looks up the longest suffix of the text that occurs earlier in prompt or output, and the longest
    one in earlier outputs. It drafts the tokens that followed the longer of the two. At equal lengths the text's own
    match counts, at its most recent occurrence. Suffix automata find matches of any length in amortised O(1) a
    token (SAM-Decoding, Hu et al., arXiv 2411.10666).

    A proposal has at most ``max_spec_factor`` times as many tokens as its match (SuffixDecoding, Oliaro et al.,
    arXiv 2411.04975), since drafts after a short match are often rejected. On Python source, K = 8, the defaults give a
    tau of 1.54 for 2.3 drafts a step; without the factor, ``min_match=2`` gives 1.42 for as many drafts, and
    ``min_match=1`` gives 1.59 for 5.9 drafts.

    A tree has the continuations of several matches, those that occurred more often first
    (``specdec.drafters.suffix_branches``). Each match limits the length of its own continuations.

    The drafts are a function of text and memory, so q is one-hot and the distribution is unchanged. With a memory and
    rule ``token`` or ``block``, the text of a seed depends on what was decoded before. Greedy texts and those of
    ``coupled`` do not depend on it, and neither do texts without a memory.

    Args:
        memory: earlier outputs to draft from, to which finished outputs are added; None: only prompt and output.
            Drafters that are given the same memory share it. A SuffixMemory serves all sequences, whoever owns them;
            SuffixMemories have one for each owner.
        min_match: the least number of tokens of a match, >= 1.
        max_spec_factor: most drafts for each token of the match, > 0; math.inf: no limit but K.

    Raises:
        ValueError: names the argument, what was given and what is allowed.

    Example:
        >>> from specdec import SpeculativeDecoder, SuffixDrafter, SuffixMemory, load_embedded_pair
        >>> target, _, tokenizer = load_embedded_pair()
        >>> decoder = SpeculativeDecoder(target, SuffixDrafter(SuffixMemory()), num_drafts=8)
        >>> prompt = tokenizer("import os").input_ids
        >>> first, second = (decoder.generate([prompt], max_new_tokens=32) for _ in range(2))
        >>> first.tokens == second.tokens, second.stats.steps < first.stats.steps  # the second one was there before
        (True, True)
    """

    copying = trees = True
    max_match = ANY  # tokens of a match; a PromptLookupDrafter has fewer

    def __init__(
        self, memory: SuffixMemory | SuffixMemories | None = None, min_match: int = 1, max_spec_factor: float = 2.0
    ):
        if memory is not None and not isinstance(memory, (SuffixMemory, SuffixMemories)):
            refuse("memory", type(memory).__name__, "a SuffixMemory, SuffixMemories or None")
        read_count("min_match", min_match, 1)
        number = isinstance(max_spec_factor, (int, float)) and not isinstance(max_spec_factor, bool)
        if not number or math.isnan(max_spec_factor) or max_spec_factor <= 0:
            refuse("max_spec_factor", repr(max_spec_factor), "a number > 0")
        self.memory, self.min_match, self.max_spec_factor = memory, min_match, max_spec_factor

    def start(self, batch: BatchState) -> SuffixSession:
        return SuffixSession(self, batch)

    def memory_of(self, owner: Hashable) -> SuffixMemory | None:
        """Returns the memory that serves a sequence."""
        return self.memory.of(owner) if isinstance(self.memory, SuffixMemories) else self.memory

    def longest(self, match: int, most: int) -> int:
        """Returns how many of ``most`` tokens are proposed after a match of ``match`` tokens."""
        return max(1, int(min(most, self.max_spec_factor * match)))


class SuffixSession(DraftSession):
    """Each sequence's automaton of its own text, and its cursor in the memory's automaton. A sequence that does not
    draft in a step is brought up to date at its next drafts."""

    def __init__(self, drafter: SuffixDrafter, batch: BatchState):
        self.drafter, self.owners = drafter, batch.owners
        self.timer, self.ends, self.nodes = batch.timer, batch.ends, batch.nodes
        self.memories: list[SuffixMemory | None] = [None] * batch.size
        self.own = [SuffixAutomaton() for _ in range(batch.size)]
        self.past: list[Cursor | None] = [None] * batch.size

    def begin(self, prompts: Mapping[int, list[int]]) -> None:
        for row, prompt in prompts.items():
            self.memories[row] = memory = self.drafter.memory_of(self.owners[row])
            self.own[row], self.past[row] = SuffixAutomaton(prompt), None if memory is None else memory.cursor()
        self.timer.lap("prefill")

    def propose(self, step: Step) -> Drafts | Copies:
        if self.nodes:
            trees = [self._tree(row, text, step.allowed[row]) for row, text in enumerate(step.texts)]
            return as_trees(trees, step.last_two.device)
        return Copies.of(self._propose, step)

    def _reading(self, row: int) -> AbstractContextManager:
        memory = self.memories[row]
        return nullcontext() if memory is None else memory.reading

    def _own(self, row: int, text: list[int]) -> SuffixAutomaton:
        """Returns the automaton of a row's text."""
        own = self.own[row]
        own.extend(text[len(own) :])
        return own

    def _tree(self, row: int, text: list[int], most: int) -> Branches:
        if not most:
            return Branches(0)
        tree, past = Branches(self.nodes, self.ends[row]), self.past[row]
        sources: list[SuffixAutomaton | Cursor] = [self._own(row, text)]
        with self._reading(row):
            if past is not None:
                past.follow(text[past.followed :])
                sources.append(past)
            drafter = self.drafter
            branch(sources, drafter.min_match, drafter.max_match, lambda n: drafter.longest(n, most), tree)
        return tree

    def _propose(self, row: int, text: list[int], most: int) -> tuple[list[int], int, Votes]:
        """Returns a proposal, how many tokens its match has, and its votes."""
        drafter, past = self.drafter, self.past[row]
        limits = drafter.min_match, drafter.max_match, drafter.max_spec_factor, most
        tokens, length, counts = self.own[row].look(text, *limits)
        votes = Votes.of(*counts)
        if past is not None:
            with self._reading(row):
                past.follow(text[past.followed :])
                longest, there = past.longest_suffix()
                if longest > length and longest >= drafter.min_match:
                    copied = past.copied(there, drafter.longest(longest, most))
                    if copied:  # there are none at the end of an earlier text
                        tokens, length, votes = copied, longest, Votes.UNKNOWN
        return until_end(tokens, self.ends[row]), length, votes

    def end(self, row: int, output: list[int]) -> None:
        memory, self.memories[row] = self.memories[row], None
        self.own[row], self.past[row] = SuffixAutomaton(), None
        if memory is not None:
            memory.add([output])
