"""Who proposes tokens. A drafter is shared by all generations; what it knows of one of them lives in its session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from specdec_kernels import Rule, SamplingParams, TokenTable

from ..models.kv_cache import StaticKVCache
from ..sampling.processors import Processors
from ..stats import Stopwatch

__all__ = ["DraftSession", "Drafter", "Drafts", "Generation", "Step"]


@dataclass
class Generation:
    """What the steps of a batch have in common. Its rows hold one sequence each, at a time; the loop keeps what these
    ask for (``params``, ``seed``, ``greedy``) current, and sessions read it in every step."""

    size: int  # B, rows
    capacity: int  # slots for each sequence's tokens, and one more as trash
    rule: Rule
    compact_q: int  # q is to be truncated to so many tokens, and handed over as ids and log q; 0: it is not
    backend: str
    stopwatch: Stopwatch  # sessions give their laps to "draft_forwards" and "kernels"
    target_cache: StaticKVCache  # holds every prompt but for its last token when a sequence is admitted
    processors: Processors  # that turn raw logits into those to draw from; False: no row has any
    params: SamplingParams  # [B] tensors
    seed: torch.Tensor  # [B] int64
    greedy: bool = True  # temperature 0 in all rows


@dataclass(frozen=True)
class Step:
    """What is to be drafted. Column c of ``positions`` and ``slots`` is the token at L - 2 + c, where L is
    the number of known tokens: the last two known ones, then the drafts. Padding, drafts that do not count
    and rows without a sequence have position 0 and the trash slot.

    What the host says (``allowed``, ``texts``, ``processed``) is not there in a batch that runs ahead of it: K drafts
    may count for every row, and no text is shown. Only drafters that say ``reads_texts = False`` are asked then."""

    index: int  # the steps before this one, drafted or not; the same where a step is only measured
    num_drafts: int  # K of this step, the most that a sequence may draft; >= 1 where something is to be drafted
    lengths: torch.Tensor  # [B] int64: tokens stored in the caches, L - 1
    position: torch.Tensor  # [B] int64: L, the absolute position of the first draft; the loop advances it in place
    last_two: torch.Tensor  # [B, 2] int64: the last known tokens (the same twice where there is but one)
    positions: torch.Tensor  # [B, K + 2] int64
    slots: torch.Tensor  # [B, K + 2] int64
    visible: int  # slots that attention reads
    allowed: list[int]  # of these K, how many count for each sequence; 0 where it has ended or does not draft
    allowed_on_device: torch.Tensor  # [B] int64
    table: TokenTable | None  # what the distribution says of single tokens before this step; None: nothing
    texts: list[list[int]]  # every row's known tokens, prompt and output. The loop's own lists: to be read only
    processed: list[list[int]]  # the same as processors see it, [] where there are none


class Drafts(NamedTuple):
    """Drafts, and the q that they were drawn from, in one of three forms: logits, compact, or nothing for one-hot
    drafts. With rule ``coupled`` there is no q. Whoever hands over q draws with ``Step.table`` and
    ``Generation.processors``: it is the distribution that verification will assume."""

    # [B, k] int64 of the target's vocabulary, 0 <= k <= K: fewer columns make a cheaper verification. -1 ends a
    # sequence's drafts.
    tokens: torch.Tensor
    logits: torch.Tensor | None = None  # [B, k, V], what processors made of the raw ones
    stats: tuple[torch.Tensor, torch.Tensor] | None = None  # (cutoff, lse), [B, k] each; None where logits is
    status: torch.Tensor | None = None  # [B, k] int32, Status; None: nothing to report
    forwards: int = 0  # model calls that this took
    compact: tuple[torch.Tensor, torch.Tensor] | None = None  # (ids, log q), [B, k, k'] each
    d2t: torch.Tensor | None = None  # the target's ids of the logits' columns, where these are a reduced vocabulary

    def widened(self, columns: int) -> Drafts:
        """With so many columns, of which the new ones are no drafts: a verification of always the same shape."""
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


class DraftSession(Protocol):
    """What a drafter knows of one batch. It starts without a sequence.

    Between two calls of ``draft`` a text may have grown by any number of tokens, as steps without drafts do not ask.
    The same step may be asked twice, and has the same answer. An exception ends the drafting of this batch: the loop
    warns and goes on without. In a scheduler it is the matter of one sequence, where asking again, or leaving out one
    row (``allowed`` 0), helps.
    """

    def admit(self, prompts: Mapping[int, list[int]]) -> None:
        """These rows begin new sequences, with these prompts; what was in them before has been released."""

    def draft(self, step: Step) -> Drafts: ...

    def release(self, row: int, output: list[int]) -> None:
        """The row's sequence has ended, and emitted this."""


@runtime_checkable
class Drafter(Protocol):
    """One with caches of its own also has ``slot_bytes() -> int``: what they take for each token of a sequence, which
    counts where memory is planned."""

    def start(self, generation: Generation) -> DraftSession: ...
