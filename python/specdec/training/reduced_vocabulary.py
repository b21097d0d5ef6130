"""A smaller vocabulary for a draft: the tokens that texts have most often, and what leaving out the others costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..checks import read_count, refuse


@dataclass(frozen=True)
class Price:
    """
    Attributes:
        kept: tokens.
        covered: the share of the held-out texts' tokens that are kept: alpha is at most about as large.
        weights: bytes that a forward of the draft reads, of those that it read before.
    """

    kept: int
    covered: float
    weights: float

    @property
    def words(self) -> str:
        return (
            f"{self.kept} tokens: {self.covered:.2%} of the held-out text has one of them, so alpha loses up to "
            f"{1 - self.covered:.2%}; a forward of the draft reads {self.weights:.2f} times the bytes"
        )


def most_frequent(blocks: torch.Tensor, vocab_size: int, count: int, always: Iterable[int] = ()) -> torch.Tensor:
    """Returns the ids, ascending, of the ``count`` tokens that are most often in ``blocks`` (of equally frequent ones
    the lowest), those of ``always`` among them. Raises ValueError naming ``vocabulary``."""
    if not 1 <= read_count("vocabulary", count, 1) <= vocab_size:
        refuse("vocabulary", count, f"from 1 to {vocab_size}, the target's")
    counts = torch.bincount(blocks.flatten(), minlength=vocab_size)
    wanted = [token for token in always if 0 <= token < vocab_size]
    if wanted:
        counts[torch.tensor(wanted)] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def covering(tokens: torch.Tensor, share: float) -> int:
    """Returns how many of the most frequent tokens make this ``share`` of a text [n] int64, up to the next 64."""
    counts = torch.bincount(tokens).sort(descending=True).values.cumsum(0)
    needed = int(torch.searchsorted(counts, math.ceil(share * len(tokens)))) + 1
    return -(-needed // 64) * 64


def price(draft: PreTrainedModel, ids: torch.Tensor, held_out: Sequence[int]) -> Price:
    """What the draft will cost and gain, before its head is cut."""
    kept = {*ids.tolist()}
    head = draft.get_output_embeddings().weight
    table = draft.get_input_embeddings().weight
    # Of the table, a row is read.
    others = sum(p.numel() for p in draft.parameters() if p is not table and p is not head)
    covered = sum(token in kept for token in held_out) / max(len(held_out), 1)
    row = head.shape[1]
    return Price(len(kept), covered, (others + len(kept) * row) / (others + head.shape[0] * row))


def columns_of(tokens: torch.Tensor, ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the columns of a draft's logits that stand for ``tokens``, and which tokens have one; the others have
    some column. ``ids`` [n] are those of the columns, ascending; None: all tokens, in order."""
    if ids is None:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    columns = torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
    return columns, ids[columns] == tokens
