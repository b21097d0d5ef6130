"""Where the tokens are that a forward is fed: their positions, their slots in the cache, and what they see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..cache.tree import Tree
from .attention import Mask


class Layout(NamedTuple):
    """The positions, slots and masks of the q tokens that each sequence is fed in one or several forwards. It can be
    split by columns, so a step computes it once for all its forwards.

    Padding (after short prompts, for drafts that do not count, in finished sequences) has position 0, which every
    model has, and the trash slot, which no query sees.
    """

    positions: torch.Tensor  # [B, q] int64; over a cache that has dropped tokens, as if the text had not had these
    slots: torch.Tensor  # [B, q] int64, equal to positions except for padding and the nodes of a tree
    visible: int  # slots that attention reads
    mask: Mask | None  # [B, 1, q, visible], or one for each kind of layer; None if the forward itself makes it
    tree: Tree | None = None  # the q tokens are all of this tree's, or its last ones

    def split(self, sizes: list[int]) -> list[Layout]:
        """Returns consecutive layouts with these numbers of columns. A tree is fed whole."""
        assert self.tree is None, "a tree cannot be split"
        masks: Sequence[Mask | None]
        if isinstance(self.mask, dict):
            by_kind = [m.split(sizes, 2) for m in self.mask.values()]
            masks = [dict(zip(self.mask, parts, strict=True)) for parts in zip(*by_kind, strict=True)]
        else:
            masks = [None] * len(sizes) if self.mask is None else self.mask.split(sizes, 2)
        cut = zip(self.positions.split(sizes, 1), self.slots.split(sizes, 1), masks, strict=True)
        return [Layout(positions, slots, self.visible, mask) for positions, slots, mask in cut]
