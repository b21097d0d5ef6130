"""Documents as blocks of tokens, in an order that depends on the seed alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..checks import refuse


class Packed:
    """Documents one after the other, cut into blocks. The last tokens, which fill no block, are left out.

    Args:
        documents: token ids, the end-of-sequence token of each included.
        length: tokens of a block.
        size: blocks of a batch.
        seed: of the order of the blocks, which is another one in each epoch.

    Raises:
        ValueError: names ``data``: there are not as many tokens as a batch has.
    """

    def __init__(self, documents: Sequence[Sequence[int]], length: int, size: int, seed: int):
        text = torch.tensor([token for document in documents for token in document], dtype=torch.int64)
        self.blocks = text[: len(text) // length * length].view(-1, length)  # [n, length]
        self._size, self._seed = size, seed
        self._order: tuple[int, torch.Tensor] | None = None
        if len(self.blocks) < size:
            refuse("data", f"{len(text)} tokens", f"at least {size * length}, those of one batch")

    @property
    def batches(self) -> int:
        """Of one epoch."""
        return len(self.blocks) // self._size

    def batch(self, step: int) -> torch.Tensor:
        """Returns the indices of the blocks of batch number ``step``, [size]."""
        epoch, at = divmod(step, self.batches)
        if self._order is None or self._order[0] != epoch:
            chance = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = (epoch, torch.randperm(len(self.blocks), generator=chance))
        return self._order[1][at * self._size : (at + 1) * self._size]
