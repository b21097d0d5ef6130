"""Who proposes tokens. A drafter is shared by all generations; what it knows of one of them lives in its session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from specdec_kernels import Rule, SamplingParams, TokenTable

from ..cache import StaticKVCache
from ..processors import Processors
from ..stats import Stopwatch

__all__ = ["DraftSession", "Drafter", "Drafts", "Generation", "Step"]


@dataclass(frozen=True)
class Generation:
    """What does not change from step to step."""

    prompts: list[list[int]]
    capacity: int  # slots for each sequence's tokens, and one more as trash
    params: SamplingParams  # [B] tensors
    seed: torch.Tensor  # [B] int64
    greedy: bool  # temperature 0 for the whole batch
    rule: Rule
    compact_q: int  # q is to be truncated to so many tokens, and handed over as ids and log q; 0: it is not
    processors: Processors | None  # that turn raw logits into those to draw from
    backend: str
    stopwatch: Stopwatch  # sessions give their laps to "draft_forwards" and "kernels"
    target_cache: StaticKVCache  # holds every prompt but for its last token when sessions start


@dataclass(frozen=True)
class Step:
    """What is to be drafted. Column c of ``positions`` and ``slots`` is the token at L - 2 + c, where L is
    the number of known tokens: the last two known ones, then the drafts. Padding, drafts that do not count
    and finished sequences have position 0 and the trash slot."""

    index: int  # the steps before this one, drafted or not; the same where a step is only measured
    num_drafts: int  # K of this step, the most that a sequence may draft; >= 1 where something is to be drafted
    lengths: torch.Tensor  # [B] int64: tokens stored in the caches, L - 1
    position: torch.Tensor  # [B] int64: L, the absolute position of the first draft
    last_two: torch.Tensor  # [B, 2] int64: the last known tokens (the same twice where there is but one)
    positions: torch.Tensor  # [B, K + 2] int64
    slots: torch.Tensor  # [B, K + 2] int64
    visible: int  # slots that attention reads
    allowed: list[int]  # of these K, how many count for each sequence; 0 where it has ended or does not draft
    table: TokenTable | None  # what the law says of single tokens before this step; None: nothing
    texts: list[list[int]]  # every sequence's known tokens, prompt and output. The loop's own lists: to be read only
    processed: list[list[int]]  # the same as processors see it, [] where a sequence has ended; [] without processors


class Drafts(NamedTuple):
    """Drafts, and the q that they were drawn from, in one of three forms: logits, compact, or nothing for one-hot
    drafts. With rule ``coupled`` there is no q. Whoever hands over q draws with ``Step.table`` and
    ``Generation.processors``: it is the law that verification will assume."""

    # [B, k] int64 of the target's vocabulary, 0 <= k <= K: fewer columns make a cheaper verification. -1 ends a
    # sequence's drafts.
    tokens: torch.Tensor
    logits: torch.Tensor | None = None  # [B, k, V], what processors made of the raw ones
    stats: tuple[torch.Tensor, torch.Tensor] | None = None  # (cutoff, lse), [B, k] each; None where logits is
    status: torch.Tensor | None = None  # [B, k] int32, Status; None: nothing to report
    forwards: int = 0  # model calls that this took
    compact: tuple[torch.Tensor, torch.Tensor] | None = None  # (ids, log q), [B, k, k'] each
    d2t: torch.Tensor | None = None  # the target's ids of the logits' columns, where these are a reduced vocabulary


class DraftSession(Protocol):
    """What a drafter knows of one generation.

    Between two calls of ``draft`` a text may have grown by any number of tokens, as steps without drafts do not ask.
    The same step may be asked twice, and has the same answer. An exception ends the drafting of this generation: the
    loop warns and goes on without.
    """

    def draft(self, step: Step) -> Drafts: ...

    def finish(self, outputs: list[list[int]]) -> None:
        """Called once, when all sequences have ended, with what they emitted."""


@runtime_checkable
class Drafter(Protocol):
    def start(self, generation: Generation) -> DraftSession: ...
