"""Who proposes tokens. A drafter is shared by all generations; what it knows of one of them lives in its session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from specdec_kernels import SamplingParams

from ..stats import Stopwatch

__all__ = ["DraftSession", "Drafter", "Drafts", "Generation", "Step"]


@dataclass(frozen=True)
class Generation:
    """What does not change from step to step."""

    prompts: list[list[int]]
    capacity: int  # slots for each sequence's tokens, and one more as trash
    params: SamplingParams
    seed: torch.Tensor  # [B] int64
    greedy: bool  # temperature 0 for the whole batch
    backend: str
    stopwatch: Stopwatch  # sessions give their laps to "draft_forwards" and "kernels"


@dataclass(frozen=True)
class Step:
    """What is to be drafted. Column c of ``positions`` and ``slots`` is the token at L - 2 + c, where L is
    the number of known tokens: the last two known ones, then the drafts. Padding, drafts that do not count
    and finished sequences have position 0 and the trash slot."""

    num_drafts: int  # K of this step
    lengths: torch.Tensor  # [B] int64: tokens stored in the caches, L - 1
    position: torch.Tensor  # [B] int64: L, the absolute position of the first draft
    last_two: torch.Tensor  # [B, 2] int64: the last known tokens (the same twice where there is but one)
    positions: torch.Tensor  # [B, K + 2] int64
    slots: torch.Tensor  # [B, K + 2] int64
    visible: int  # slots that attention reads


class Drafts(NamedTuple):
    tokens: torch.Tensor  # [B, K] int64; -1 ends a sequence's drafts
    logits: torch.Tensor | None  # [B, K, V] that they were drawn from; None: one-hot
    stats: tuple[torch.Tensor, torch.Tensor] | None  # (cutoff, lse), [B, K] each; None where logits is
    status: torch.Tensor | None  # [B, K] int32, Status; None: nothing to report
    forwards: int  # model calls that this took


class DraftSession(Protocol):
    def draft(self, step: Step) -> Drafts: ...


@runtime_checkable
class Drafter(Protocol):
    def start(self, generation: Generation) -> DraftSession: ...
