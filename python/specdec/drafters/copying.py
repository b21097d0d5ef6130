"""Shared by drafters without a model: copies proposals from texts, and makes one tensor of a batch's proposals."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from .protocol import Copies, Drafts


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


def copied(copies: Copies, ends: Sequence[Set[int]], device: torch.device) -> Drafts:
    """Returns drafts with a one-hot q, as many columns as the longest proposal has tokens; shorter ones end in -1.

    Args:
        copies: of the batch's first rows.
        ends: by row, the end-of-sequence tokens after which a proposal is cut.
    """
    proposals = [until_end(proposal, ends[row]) for row, proposal in enumerate(copies.tokens)]
    longest = max(map(len, proposals))
    rows = [proposal + [-1] * (longest - len(proposal)) for proposal in proposals]
    tokens = torch.tensor(rows, dtype=torch.int64, device=device)
    return Drafts(tokens, copies=Copies(proposals, copies.matched))
