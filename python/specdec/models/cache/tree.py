"""A tree of tokens that follows each sequence's text in one forward: the tokens' positions, and what each one sees."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tree(NamedTuple):
    """The shape of a tree of N + 1 tokens: the root, which is the last known token of the text, and N nodes, every one
    after its parent. Each token's keys go to the slot of its place in this order, counted from the root's; its position
    is the root's and its depth. So two nodes may have one position, and slots no longer say positions.

    One forward feeds all of the tokens, or the last q of them after earlier forwards fed the others.

    b is the number of sequences, or 1 if all of them have the same tree.
    """

    depths: torch.Tensor  # [b, N + 1] int64: edges from the root
    ancestors: torch.Tensor  # [b, q, N + 1] bool: [i, k] says whether token k is fed token i or an ancestor of it
    root: torch.Tensor | None = None  # [B] int64, position and slot of the root; None: the first fed token is the root
    parents: torch.Tensor | None = None  # [b, N + 1] int64: by place, the root's is -1; None: it is not fed whole

    @classmethod
    def of(cls, parents: torch.Tensor) -> Tree:
        """Returns the tree of ``parents``, [N] or [b, N] int64: each node's parent by the number of that node, from 0,
        or -1 for the root. Parents come before their children. Nothing waits for the device."""
        parents = torch.atleast_2d(parents)
        nodes = parents.shape[1]
        index = torch.arange(-1, nodes, device=parents.device)
        itself = torch.eye(nodes + 1, dtype=torch.bool, device=parents.device)
        parent = torch.nn.functional.pad(parents, (1, 0), value=-2)  # the root has none
        # Every product doubles the edges that are followed.
        reached = (itself | (parent[..., None] == index)).float()
        for _ in range(max(nodes - 1, 0).bit_length()):
            reached = (reached @ reached > 0).float()
        ancestors = reached > 0
        return cls(ancestors.sum(-1) - 1, ancestors, parents=torch.nn.functional.pad(parents + 1, (1, 0), value=-1))

    def places(self, lengths: torch.Tensor, counts: torch.Tensor, trash: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the positions and the slots of the tokens, [B, N + 1] int64 each. Those that do not count get
        position 0 and the slot ``trash``.

        Args:
            lengths: [B] int64, how many tokens of each sequence are stored: the root's position and slot.
            counts: [B, N + 1] bool, which tokens count. With a node its ancestors count, the root with all of them.
        """
        first = lengths[:, None]
        index = torch.arange(counts.shape[1], device=lengths.device)
        return torch.where(counts, first + self.depths, 0), torch.where(counts, first + index, trash)
