"""Shared by drafters without a model: copies proposals from texts, and makes one tensor of a batch's proposals."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from .protocol import Drafts


def copy_from(text: list[int], start: int, count: int) -> list[int]:
    """Returns ``count`` tokens of ``text`` from ``start`` < len(text) on. A copy that reaches the end continues with
    the tokens that it has copied, as in LZ77, so a periodic text is continued periodically."""
    piece = text[start : start + count]
    if len(piece) < count:
        piece = (piece * (count // len(piece) + 1))[:count]
    return piece


def until_end(proposal: list[int], ends: Set[int]) -> list[int]:
    """Returns the proposal up to its first token of ``ends``: none after an end-of-sequence token can be emitted."""
    return proposal[: next((i for i, token in enumerate(proposal, 1) if token in ends), len(proposal))]


def one_hot(proposals: Sequence[list[int]], ends: Sequence[Set[int]], device: torch.device) -> Drafts:
    """Returns one-hot drafts, with as many columns as the longest proposal has tokens; shorter ones end in -1.

    Args:
        ends: by row of the batch, the end-of-sequence tokens after which a proposal is cut. The proposals are those of
            the first rows.
    """
    proposals = [until_end(proposal, ends[row]) for row, proposal in enumerate(proposals)]
    longest = max(map(len, proposals))
    rows = [proposal + [-1] * (longest - len(proposal)) for proposal in proposals]
    return Drafts(torch.tensor(rows, dtype=torch.int64, device=device))
