"""What drafters without a model share: proposals are copied from texts, and a batch of them becomes one tensor."""

from __future__ import annotations

import torch

from .protocol import Drafts


def copy_from(text: list[int], start: int, count: int) -> list[int]:
    """``count`` tokens of ``text`` from ``start`` < len(text) on. A copy that reaches the end goes on with what it has
    copied, as in LZ77: the proposal after a text with a period is its periodic continuation."""
    piece = text[start : start + count]
    if len(piece) < count:
        piece = (piece * (count // len(piece) + 1))[:count]
    return piece


def one_hot(proposals: list[list[int]], device: torch.device) -> Drafts:
    """As many columns as the longest proposal has tokens, and -1 after the others."""
    longest = max(map(len, proposals))
    rows = [proposal + [-1] * (longest - len(proposal)) for proposal in proposals]
    return Drafts(torch.tensor(rows, dtype=torch.int64, device=device))
