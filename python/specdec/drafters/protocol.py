"""The protocol of drafters, which propose tokens. All generations share a drafter; each batch has its own session."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from specdec_kernels import Rule, SamplingParams, TokenTable

from ..models.kv_cache import StaticKVCache
from ..sampling.processors import Processors
from ..stats import Stopwatch

__all__ = ["DraftSession", "DraftTree", "Drafter", "Drafts", "Generation", "Step"]


@dataclass
class Generation:
    """What all steps of a batch share. A row holds one sequence at a time. The loop updates ``params``, ``seed``,
    ``ends``, ``predictions``, ``owners`` and ``greedy`` when sequences change, so sessions read them anew in every
    step."""

    size: int  # B, rows
    capacity: int  # slots of a row, the trash slot included
    most_drafts: int  # the largest K of a step
    rule: Rule
    compact_q: int  # q is truncated to this many tokens, and returned as ids and log q; 0: it is not truncated
    backend: str
    stopwatch: Stopwatch  # sessions add their laps to "draft_forwards" and "kernels"
    target_cache: StaticKVCache  # holds every prompt except its last token when a sequence is admitted
    processors: Processors  # applied to raw logits before a token is drawn; false if no row has any
    params: SamplingParams  # packed [n] tensors, of the rows that the step has
    seed: torch.Tensor  # [n] int64
    ends: list[frozenset[int]]  # the end-of-sequence tokens of each row's sequence; empty for a row without one
    predictions: list[Sequence[int]]  # tokens that each row's sequence is likely to emit; empty: nothing is predicted
    owners: list[Hashable]  # whose memory of earlier texts serves each row's sequence; None: nobody's
    greedy: bool = True  # all rows have temperature 0
    nodes: int = 0  # the most nodes of a tree that a step verifies; 0: chains


@dataclass(frozen=True)
class Step:
    """One step, as a session sees it. It has the first n rows of the batch. These are all, unless the session has
    ``takes_fewer_rows = True``; those after them have no sequence.

    Column c of ``positions`` and ``slots`` is the token at position L - 2 + c, where L is the number of known tokens:
    first the last two known tokens, then the drafts. Padding, drafts that do not count and rows without a sequence have
    position 0 and the trash slot.

    If the device runs ahead of the host, ``texts`` and the rows of ``processed`` are empty, and ``allowed`` does not
    know how much room rows have left. Only sessions with ``reads_texts = False`` are asked for drafts in such a
    step."""

    index: int  # the number of steps before this one, drafted or not; a step that is only measured does not count
    num_drafts: int  # K of this step, the most tokens that a sequence may draft; >= 1 if any row drafts
    lengths: torch.Tensor  # [n] int64: tokens stored in the caches, L - 1
    position: torch.Tensor  # [n] int64: L, the absolute position of the first draft; the loop advances it in place
    last_two: torch.Tensor  # [n, 2] int64: the last two known tokens (a single known token is there twice)
    positions: torch.Tensor  # [n, K + 2] int64
    slots: torch.Tensor  # [n, K + 2] int64
    visible: int  # slots that attention reads
    allowed: list[int]  # how many of the K drafts count for each row; 0 if its sequence has ended or does not draft
    allowed_on_device: torch.Tensor  # [n] int64
    table: TokenTable | None  # biases, bans and penalties of tokens before this step; None: there are none
    texts: list[list[int]]  # every row's known tokens, prompt and output: the loop's own lists, not to be changed
    processed: list[list[int]]  # the texts as processors see them; [] for a row without processors


class Drafts(NamedTuple):
    """Drafts, and the q that they were drawn from, in one of three forms: logits, compact, or nothing for one-hot
    drafts. With rule ``coupled`` there is no q. A session that returns q must have drawn with ``Step.table`` and
    ``Generation.processors``, because verification assumes this distribution."""

    # [B, k] int64 of the target's vocabulary, 0 <= k <= K; fewer columns make verification cheaper. -1 ends a
    # sequence's drafts.
    tokens: torch.Tensor
    logits: torch.Tensor | None = None  # [B, k, V], after processors
    stats: tuple[torch.Tensor, torch.Tensor] | None = None  # (cutoff, lse), [B, k] each; None if ``logits`` is None
    status: torch.Tensor | None = None  # [B, k] int32, Status; None: nothing to report
    forwards: int = 0  # model calls that drafting took
    compact: tuple[torch.Tensor, torch.Tensor] | None = None  # (ids, log q), [B, k, k'] each
    d2t: torch.Tensor | None = None  # the target's ids of the logits' columns, if these are a reduced vocabulary

    def widened(self, columns: int) -> Drafts:
        """Returns the drafts with ``columns`` columns, the added ones empty, so that verification keeps its shape."""
        missing = columns - self.tokens.shape[1]
        if missing == 0:
            return self

        def more(part: torch.Tensor, value: float) -> torch.Tensor:
            return torch.cat((part, part.new_full((part.shape[0], missing, *part.shape[2:]), value)), 1)

        return self._replace(
            tokens=more(self.tokens, -1),
            logits=None if self.logits is None else more(self.logits, 0),
            stats=None if self.stats is None else (more(self.stats[0], 0), more(self.stats[1], 0)),
            status=None if self.status is None else more(self.status, 0),
            compact=None
            if self.compact is None
            else (more(self.compact[0], SamplingParams.TABLE_PADDING), more(self.compact[1], -torch.inf)),
        )


class DraftTree(NamedTuple):
    """A tree of drafts for every sequence: several continuations, which share their beginnings.

    A tree without logits is verified by rule ``walk``, whatever the rule of other steps. It emits the text of plain
    sampling whatever the nodes are: they may depend on anything, the random numbers of that rule included. With
    ``coupled`` there are no logits. With ``token`` and ``block``, the children of a node are all those that
    ``draft_children`` drew there, in its order, and which tokens these are may only decide whether they have children.
    """

    # [B, n] int64 of the target's vocabulary, 0 <= n <= Generation.nodes. -1: there is no such node, nor any below it.
    # Nodes further down than a row may draft (``Step.allowed``) do not count.
    tokens: torch.Tensor
    parents: torch.Tensor  # [B, n] or [n] int64: the node that each one follows, which comes before it; -1: the root
    # [B, n + 1, V]: what the children of row r were drawn from; row 0 is the root, row 1 + i node i. After processors.
    logits: torch.Tensor | None = None
    d2t: torch.Tensor | None = None  # the target's ids of the logits' columns, if these are a reduced vocabulary
    forwards: int = 0  # model calls that drafting took
    # [B, n + 1] int32, Status of the rows that children were drawn from, 0 in others; None: nothing to report
    status: torch.Tensor | None = None

    def with_faults(self, statuses: Sequence[torch.Tensor]) -> DraftTree:
        """Returns the tree with the gravest of these statuses [B] as that of the root, of which one is enough for a
        sequence to draft no more."""
        status = self.tokens.new_zeros(len(self.tokens), self.tokens.shape[1] + 1, dtype=torch.int32)
        status[:, 0] = torch.stack(list(statuses), 1).amax(1)
        return self._replace(status=status)

    def widened(self, nodes: int) -> DraftTree:
        """Returns the tree with ``nodes`` nodes, of which the added ones do not count."""
        missing = nodes - self.tokens.shape[1]
        tokens, parents = (torch.nn.functional.pad(t, (0, missing), value=-1) for t in self[:2])
        logits = None if self.logits is None else torch.nn.functional.pad(self.logits, (0, 0, 0, missing))
        status = None if self.status is None else torch.nn.functional.pad(self.status, (0, missing))
        return self._replace(tokens=tokens, parents=parents, logits=logits, status=status)


class DraftSession(Protocol):
    """A drafter's state for one batch. It starts without sequences.

    Between two calls of ``draft`` a text may have grown by any number of tokens, because ``draft`` is not called for
    steps without drafts. A session that needs to be told of these tokens has a method
    ``show(texts: Mapping[int, list[int]], starts: Mapping[int, int])``. It is called before ``draft``, with the texts
    of rows that draft next and of which more than the last two tokens may be new: new sequences (start 0), and those
    that have had steps without drafts. It has seen the tokens before ``starts``.

    A session with ``takes_fewer_rows = True`` returns drafts for the rows that a step has, which may be the first ones
    of the batch only. For others each step has all rows.

    If a drafter has ``proposes_trees = True``, its sessions have a method ``draft_tree(step: Step) -> DraftTree`` as
    well, called in the place of ``draft`` where ``Generation.nodes`` is not 0. K is then the most nodes of a path. A
    session with a cache of its own may have a method ``compact(path: Tensor)``, called after each such step with the
    accepted nodes [B, D + 1] int64, then -1, as ``TreeStep`` has them. If a drafter has ``samples_trees = True``, its
    sessions draw the children of nodes under rules ``token`` and ``block``.

    ``draft`` may be called twice for the same step, and must then return the same drafts. If it raises,
    the loop warns and the batch continues without drafts. In a scheduler, the loop first calls it again, and then with
    one row left out (``allowed`` 0) at a time; if a call succeeds, at most that row's sequence loses its drafts.
    """

    def admit(self, prompts: Mapping[int, list[int]]) -> None:
        """Begins new sequences with these prompts in these rows, whose previous sequences were released before."""

    def draft(self, step: Step) -> Drafts: ...

    def release(self, row: int, output: list[int]) -> None:
        """Ends the row's sequence, which has emitted ``output``."""


@runtime_checkable
class Drafter(Protocol):
    """Starts a session for each batch. A drafter with its own caches also has ``slot_bytes() -> int``, the bytes that
    they take for each token of a sequence, for the planning of memory; and if it needs more than N slots after a text
    to grow a tree of N nodes, ``tree_slots(nodes: int, depth: int) -> int``, how many for N and K."""

    def start(self, generation: Generation) -> DraftSession: ...
