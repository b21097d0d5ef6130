"""Shared by drafters without a model: cuts proposals at an end, and merges continuations of a text to trees."""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch

from .protocol import Drafts


def until_end(proposal: list[int], ends: Set[int]) -> list[int]:
    """Returns the proposal up to its first token of ``ends``: none after an end-of-sequence token can be emitted."""
    if ends.isdisjoint(proposal):
        return proposal
    return proposal[: next(i for i, token in enumerate(proposal, 1) if token in ends)]


class Branches:
    """A tree that grows by continuations of one text, which share the nodes of their common beginnings.

    Args:
        most: the most nodes, >= 0.
        ends: end-of-sequence tokens, after which no node is to be added.
    """

    def __init__(self, most: int, ends: Set[int] = frozenset()):
        self.most, self.ends = most, ends
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}  # by parent and token

    @property
    def full(self) -> bool:
        return len(self.tokens) >= self.most

    def child(self, node: int, token: int) -> int | None:
        """Returns the number of the child of ``node`` (-1: the root) that holds ``token``, which is added if there is
        none. None: there is no room."""
        child = self._children.get((node, token))
        if child is None and not self.full:
            child = self._children[node, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(node)
        return child


def as_trees(branches: Iterable[Branches], device: torch.device) -> Drafts:
    """Returns the trees of a batch, with as many columns as the largest has nodes."""
    of_rows = list(branches)
    most = max(len(tree.tokens) for tree in of_rows)

    def column(values: list[int]) -> list[int]:
        return values + [-1] * (most - len(values))

    tokens = torch.tensor([column(tree.tokens) for tree in of_rows], dtype=torch.int64, device=device)
    parents = torch.tensor([column(tree.parents) for tree in of_rows], dtype=torch.int64, device=device)
    return Drafts(tokens, parents)
