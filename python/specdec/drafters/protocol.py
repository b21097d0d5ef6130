"""What a drafter is: it proposes tokens, which the target verifies.

A :class:`Drafter` serves all generations of a decoder. Each batch has a :class:`DraftSession` of its own, which keeps
what the drafter knows of the batch's rows. A drafter of one's own is a subclass of each::

    class Repeat(Drafter):
        def start(self, batch):
            return RepeatSession()

    class RepeatSession(DraftSession):
        def propose(self, step):
            texts = zip(step.texts, step.allowed, strict=True)
            return Drafts.of([text[-1:] * most for text, most in texts], step)

A drafter that raises, or returns what verification would refuse, is dropped for the batch, with its error in the log.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat
from operator import gt
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import LogitsProcessorList

from specdec_kernels import Rule, SamplingTensors

from ..checks import refuse
from ..stats import Timer

if TYPE_CHECKING:
    from ..models.cache.kv_cache import StaticKVCache
    from ..models.forward.cached_model import CachedModel
    from ..sampling.grammar import Grammar
    from ..sampling.grammar_masks import GrammarMasks
    from ..sampling.processors import Processors

__all__ = ["BatchState", "Copies", "DraftSession", "Drafter", "Drafts", "HostStep", "Share", "Step"]


@dataclass
class BatchState:
    """What all steps of a batch share. A row holds one sequence at a time: ``begin`` and ``end`` change what is said of
    it here, so sessions read that anew."""

    size: int  # B, rows
    capacity: int  # slots of a row, the trash slot included
    most_drafts: int  # the largest K of a step
    nodes: int  # N, the most nodes of a tree that a step verifies; 0: sessions propose chains
    rule: Rule  # with which drafts are drawn
    backend: str
    timer: Timer  # sessions add their laps to "draft_forwards" and "kernels"
    target_cache: StaticKVCache  # holds every prompt except its last token when a sequence begins
    processors: Processors  # applied to raw logits before a token is drawn; false if no row has any
    grammars: GrammarMasks  # which tokens grammars allow after each text; false if no row has a grammar
    ends: list[frozenset[int]]  # the end-of-sequence tokens of each row's sequence; empty for a row without one
    predictions: list[Sequence[int]]  # tokens that each row's sequence is likely to emit; empty: nothing is predicted
    owners: list[Hashable]  # whose memory of earlier texts serves each row's sequence; None: nobody's
    prefill_chunk: int | None = None  # each text is read alone, in parts of so many tokens; None: all at once

    def begin(
        self,
        row: int,
        processors: LogitsProcessorList,
        grammar: Grammar | None,
        ends: frozenset[int],
        prediction: Sequence[int],
        owner: Hashable,
    ) -> None:
        """Takes what steps and sessions need to know of the sequence that begins in a row."""
        self.processors.of_rows[row] = processors
        if grammar is not None:
            self.grammars.begin(row, grammar)
        self.ends[row], self.predictions[row], self.owners[row] = ends, prediction, owner

    def end(self, row: int) -> None:
        """Forgets the sequence of a row, which has ended."""
        self.processors.of_rows[row] = LogitsProcessorList()
        self.processors.errors.pop(row, None)
        self.grammars.end(row)
        self.ends[row], self.predictions[row], self.owners[row] = frozenset(), (), None


@dataclass(frozen=True)
class HostStep:
    """What the host says of one step of the first n rows of a batch; those after them have no sequence.

    If the device runs ahead of the host, or the step is a CUDA graph, ``texts`` and ``seen`` are empty, and only
    sessions with ``needs_host = False`` are asked for drafts. Where the shape is fixed, ``allowed`` does not know how
    much room rows have left; ``Step.allowed_on_device`` always does.
    """

    index: int  # the number of steps before this one, drafted or not
    num_drafts: int  # K, the most tokens of a chain, or of a path of a tree; >= 1 if any row drafts
    visible: int  # slots that attention reads
    allowed: list[int]  # how many of the K drafts count for each row; 0 if its sequence has ended or does not draft
    texts: list[list[int]]  # every row's known tokens, prompt and output: the loop's own lists, not to be changed
    seen: list[list[int]]  # the texts as processors see them; [] for a row without processors
    greedy: bool  # whether all rows have temperature 0
    fixed_shape: bool  # whether K columns, or N nodes, are verified even if fewer were drafted
    log_probs: bool  # whether to compute the log-probabilities of the emitted tokens
    num_ranked: int  # how many of the batch's rows also want ranks and most likely tokens
    top: int  # how many most likely tokens are found in these rows
    cut: Callable[[Copies], int | None]  # chooses how many copied drafts are verified; None: all of them
    # Decides who drafts each row, of what was found to copy, how many drafts each row may have, and whether the other
    # drafter has missed tokens. It knows the past alone, no number that the step is drawn with.
    share: Callable[[Copies, Sequence[int], bool], Share]

    @property
    def key(self) -> tuple[int, int, bool, bool, int, int]:
        """What a captured step fixes of it. All else is empty or the same wherever steps are captured."""
        return self.num_drafts, self.visible, self.greedy, self.log_probs, self.num_ranked, self.top


@dataclass(frozen=True)
class Step(HostStep):
    """One step: what the host says of it, and what the device knows.

    Column c of ``positions`` and ``slots`` is the token at position L - 2 + c, where L is the number of known tokens:
    first the last two known tokens, then the drafts of a chain. Padding, drafts that do not count and rows without a
    sequence have position 0 and the trash slot.
    """

    lengths: torch.Tensor  # [n] int64: tokens stored in the caches, L - 1
    position: torch.Tensor  # [n] int64: L, the absolute position of the first draft; the loop advances it in place
    last_two: torch.Tensor  # [n, 2] int64: the last two known tokens (a single known token is there twice)
    positions: torch.Tensor  # [n, K + 2] int64
    slots: torch.Tensor  # [n, K + 2] int64
    allowed_on_device: torch.Tensor  # [n] int64
    live: torch.Tensor  # [n] bool: rows with a sequence that has not ended
    seed: torch.Tensor  # [n] int64
    sampling: SamplingTensors  # temperature, filters, penalties, biases and bans of the rows, before this step


class Votes(IntEnum):
    """What followed a row's last token where that occurred earlier, beside the first token to copy. A word that goes on
    in many ways says little, however often it occurred."""

    UNKNOWN = 0  # this was not counted
    ONCE = 1  # it occurred once, and so this token followed
    ALL = 2  # this token, each time
    MOST = 3  # this token, more often than all others together
    FEW = 4

    @classmethod
    def of(cls, occurred: int, followed: int) -> Votes:
        """Returns those of a token that ``occurred`` so often, and that the other one ``followed`` so often."""
        if occurred <= 1:
            return cls.ONCE if occurred else cls.UNKNOWN
        if followed >= occurred:
            return cls.ALL
        return cls.MOST if 2 * followed > occurred else cls.FEW


class Copies(NamedTuple):
    """What was found for each row to copy: tokens after a place in some text, how many tokens before this place are
    those before the drafts, and how what followed in other places speaks for the first token."""

    tokens: list[list[int]]
    matched: list[int]
    votes: list[Votes] | None = None  # None: they are unknown in all rows

    def check(self, rows: int) -> None:
        """Raises ValueError where the loop could not learn from them. What their tokens are, tensors of them show."""
        fine = len(self.tokens) == len(self.matched) == rows and (self.votes is None or len(self.votes) == rows)
        for tokens, count in zip(self.tokens, self.matched, strict=False):
            fine = fine and isinstance(tokens, list) and isinstance(count, int) and count >= 0
        for votes in self.votes or ():
            fine = fine and isinstance(votes, Votes)
        if not fine:
            refuse("Copies", repr(self), f"{rows} lists, {rows} counts >= 0, and None or {rows} Votes")

    def put(self, row: int, tokens: list[int], matched: int, votes: Votes = Votes.UNKNOWN) -> None:
        """Puts what was found for a row."""
        self.tokens[row], self.matched[row] = tokens, matched
        if self.votes is not None:
            self.votes[row] = votes

    def votes_of(self, row: int) -> Votes:
        """Returns those of a row."""
        return Votes.UNKNOWN if self.votes is None else self.votes[row]

    def of_rows(self) -> Iterator[tuple[list[int], int, Votes]]:
        """Yields tokens, matched and votes of each row."""
        return zip(self.tokens, self.matched, self.votes or repeat(Votes.UNKNOWN), strict=False)

    def up_to(self, allowed: Sequence[int]) -> Copies:
        """Returns those that each row may draft."""
        if not any(map(gt, map(len, self.tokens), allowed)):
            return self
        return self._replace(tokens=[tokens[:most] for tokens, most in zip(self.tokens, allowed, strict=True)])

    @classmethod
    def none(cls, rows: int) -> Copies:
        """Returns that nothing was found in so many rows."""
        return cls([[] for _ in range(rows)], [0] * rows, [Votes.UNKNOWN] * rows)

    @classmethod
    def of(cls, find: Callable[[int, list[int], int], tuple[list[int], int, Votes]], step: Step) -> Copies:
        """Returns what ``find`` finds in the rows that draft, given a row, its text and how many tokens it may draft:
        what ``put`` takes."""
        copies = cls.none(len(step.texts))
        for row, (text, most) in enumerate(zip(step.texts, step.allowed, strict=True)):
            if most:
                copies.put(row, *find(row, text, most))
        return copies


class Share(NamedTuple):
    """Who drafts in a step: rows copy, or are left to another drafter, which is not asked if no row is left to it."""

    num_drafts: int  # the most tokens that a row drafts, <= K
    copying: Sequence[bool]  # by row, whether it copies


class Drafts(NamedTuple):
    """Drafted tokens, a chain or a tree for every row, and the q that they were drawn from.

    Without ``logits`` q is one-hot, or the rule needs none. ``coupled`` needs none for chains. A tree without logits is
    walked down, which emits the text of plain sampling whatever its nodes are.

    A session that returns q must have drawn with ``Step.sampling`` and ``BatchState.processors``, because verification
    assumes this distribution. The children of a node of a sampled tree are all those that ``draft_children`` drew
    there, in its order. Which tokens these are may only decide whether they have children.
    """

    # [n, k] int64 of the target's vocabulary; k <= K for a chain, k <= N for a tree; fewer make verification cheaper.
    # -1 ends a chain; in a tree there is no such node, nor any below it.
    tokens: torch.Tensor
    # [n, k] or [k] int64: the node that each one follows, which comes before it; -1: the root. None: a chain. Nodes
    # further down than a row may draft do not count.
    parents: torch.Tensor | None = None
    # A chain's: [n, k, V], row i is what draft i was drawn from. A tree's: [n, k + 1, V], row 0 is what the children of
    # the root were drawn from, row 1 + i those of node i. After processors.
    logits: torch.Tensor | None = None
    stats: tuple[torch.Tensor, torch.Tensor] | None = None  # of a chain: (cutoff, lse), [n, k] each; None: unknown
    status: torch.Tensor | None = None  # int32, Status of each row that ``logits`` has or would have; None: all fine
    d2t: torch.Tensor | None = None  # the target's ids of the logits' columns, if these are a reduced vocabulary
    forwards: int = 0  # model calls that drafting took
    masked: int = (
        0  # how many drafts of a chain, from the first on, were drawn from what grammars allow, so q is masked
    )
    copies: Copies | None = None  # all that was found to copy, whether it is verified or not
    one_hot: Sequence[bool] | None = None  # by row of chains: whether q is one-hot, whatever ``logits`` has
    share: Share | None = None  # what the step decided, if it was asked
    caught_up: bool = False  # the drafter has read what it had missed, which took time

    @classmethod
    def of(cls, proposals: Sequence[Sequence[int]], step: Step, copies: Copies | None = None) -> Drafts:
        """Returns chains with a one-hot q: the tokens that each row proposes, at most K."""
        width = max(map(len, proposals), default=0)
        rows = [[*tokens, *[-1] * (width - len(tokens))] for tokens in proposals]
        tokens = torch.tensor(rows, dtype=torch.int64, device=step.last_two.device).view(len(rows), width)
        return cls(tokens, copies=copies)

    @classmethod
    def none(cls, step: Step, copies: Copies | None = None) -> Drafts:
        """Returns no drafts for any row."""
        return cls(step.last_two[:, :0], copies=copies)

    def first(self, count: int) -> Drafts:
        """Returns the first ``count`` columns of chains. ``copies`` stays whole."""
        return self._replace(
            tokens=self.tokens[:, :count],
            logits=None if self.logits is None else self.logits[:, :count],
            stats=None if self.stats is None else (self.stats[0][:, :count], self.stats[1][:, :count]),
            status=None if self.status is None else self.status[:, :count],
            masked=min(self.masked, count),
        )

    def widened(self, count: int) -> Drafts:
        """Returns the drafts with ``count`` columns, of which the added ones do not count, so that verification keeps
        its shape."""
        missing = count - self.tokens.shape[1]
        if missing == 0:
            return self

        def more(part: torch.Tensor, value: float) -> torch.Tensor:
            return torch.cat((part, part.new_full((part.shape[0], missing, *part.shape[2:]), value)), 1)

        parents = self.parents
        if parents is not None:
            parents = torch.nn.functional.pad(parents, (0, missing), value=-1)
        return self._replace(
            tokens=more(self.tokens, -1),
            parents=parents,
            logits=None if self.logits is None else more(self.logits, 0),
            stats=None if self.stats is None else (more(self.stats[0], 0), more(self.stats[1], 0)),
            status=None if self.status is None else more(self.status, 0),
        )

    def with_faults(self, statuses: Sequence[torch.Tensor]) -> Drafts:
        """Returns the tree with the gravest of these statuses [n] as that of the root, of which one is enough for a
        sequence to draft no more."""
        status = self.tokens.new_zeros(len(self.tokens), self.tokens.shape[1] + 1, dtype=torch.int32)
        status[:, 0] = torch.stack(list(statuses), 1).amax(1)
        return self._replace(status=status)


class DraftSession(ABC):
    """A drafter's state for one batch. It starts without sequences.

    ``propose`` is not called for steps without drafts, so between two calls a text may have grown by any number of
    tokens. A session that must read every token once, as one with a cache of its own, overrides ``observe``; one that
    looks at ``Step.texts`` needs nothing more.
    """

    needs_host = True  # False: ``propose`` reads neither ``Step.texts`` nor ``seen``, so the device may run ahead

    def copy_rows(self, sources: Sequence[int], rows: Sequence[int], count: int) -> None:
        """Takes what it has stored of the first ``count`` tokens of the texts in the rows ``sources`` for the texts
        that begin next in the rows ``rows``, and nothing else that is stored there. All is read before anything is
        written. Called before ``begin`` for every text of a scheduler; a source may be the row itself, and ``count`` 0.
        A session that stores nothing, or reads every text anew in ``begin``, need not do anything."""

    def begin(self, prompts: Mapping[int, list[int]]) -> None:
        """Begins new sequences with these prompts in these rows, whose previous sequences have ended."""

    def observe(self, texts: Mapping[int, list[int]], starts: Mapping[int, int]) -> None:
        """Reads the texts of rows that draft next, if more than their last two tokens may be new: those of new
        sequences, and those after steps without drafts. The tokens before ``starts`` were seen."""

    @abstractmethod
    def propose(self, step: Step) -> Drafts | Copies:
        """Returns the step's drafts: chains, or trees if ``BatchState.nodes`` is not 0. Of a drafter that copies, the
        chains may be ``Copies``, of which the step verifies as many tokens as pay."""

    def accepted(self, path: torch.Tensor) -> None:
        """Takes the accepted nodes of the tree that ``propose`` returned, [n, D + 1] int64, then -1 (``TreeStep``)."""

    def end(self, row: int, output: list[int]) -> None:
        """Ends the row's sequence, which has emitted ``output``."""

    def release(self) -> None:
        """Leaves a cache of its own to later batches (``keep`` of a cached model). Called last, if at all."""


def proposed(session: DraftSession, step: Step) -> Drafts | Copies:
    """Returns what a session proposes. Raises TypeError if that is neither."""
    found = session.propose(step)
    if not isinstance(found, (Drafts, Copies)):
        raise TypeError(f"propose() returned {type(found).__name__}, allowed: Drafts or Copies")
    return found


class Drafter(ABC):
    """Starts a session for each batch.

    Attributes:
        copying: whether sessions find chains by copying, in a time that is nothing beside a step's, and return them as
            ``Copies``. How many of them are verified may then be chosen afterwards.
        trees: whether sessions propose trees.
        shares: whether sessions let ``HostStep.share`` decide, for each row, between copies and another drafter.
        samples_trees: whether they draw the nodes of trees under rules ``token`` and ``block``.
        model: the model that it drafts with; None: it has none, or one that the decoder need not know.
        max_length: the positions of its model. A text that is longer goes on, and it is asked for no more drafts. None:
            it has no limit of its own.
        doubt: what to look at if nothing that it drafts is accepted, which is said once; None: that can be as it is.
    """

    copying: bool = False
    shares: bool = False
    trees: bool = False
    samples_trees: bool = False
    model: CachedModel | None = None
    max_length: int | None = None
    doubt: str | None = None

    @property
    def name(self) -> str:
        """What errors call it."""
        return type(self).__name__

    @property
    def reads_only_filled(self) -> bool:
        """Whether its attention reads only the slots that are filled, whatever ``Step.visible`` says."""
        return self.model is None or self.model.reads_only_filled

    @abstractmethod
    def start(self, batch: BatchState) -> DraftSession:
        """Returns the session of a new batch."""

    def check(self, target: CachedModel, nodes: int, most_drafts: int) -> None:
        """Raises ValueError if it cannot draft for this target, or no trees of N nodes (0: chains) and paths of K."""

    def cache_bytes(self) -> int:
        """Returns the bytes that its caches take for each token of a sequence."""
        return 0

    def row_bytes(self, most_drafts: int) -> int:
        """Returns the bytes that its caches take for each sequence, however long, for up to K drafts."""
        return 0

    def tree_slots(self, nodes: int, depth: int) -> int:
        """Returns how many slots after a text its caches need to grow a tree of N nodes with paths of K."""
        return nodes
