"""What a model's trees are to be, found plainly: one full forward for each path, and lists instead of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from specdec.drafters import Drafter, Drafts, Step

Path = tuple[int, ...]
# Logits [n, V] after a text and each of n paths of drafts, which are equally long.
Rows = Callable[[list[int], list[Path]], torch.Tensor]


class Watched(Drafter):
    """A drafter that notes the texts before each of its trees, and how many tokens each row may draft."""

    trees = True

    def __init__(self, drafter: Drafter):
        self.drafter, self.steps = drafter, list[tuple[list[list[int]], list[int], Drafts]]()
        self.samples_trees, self.model, self.max_length = drafter.samples_trees, drafter.model, drafter.max_length

    def check(self, target, nodes, most_drafts):
        self.drafter.check(target, nodes, most_drafts)

    def tree_slots(self, nodes, depth):
        return self.drafter.tree_slots(nodes, depth)

    def start(self, batch):
        session = self.drafter.start(batch)
        propose = session.propose

        def noted(step: Step) -> Drafts:
            tree = propose(step)
            self.steps.append(([list(t) for t in step.texts], step.allowed_on_device.tolist(), tree))
            return tree

        session.propose = noted
        return session

    def of_rows(self) -> list[tuple[int, int, list[int], int, Drafts]]:
        """(step, row, text, the most nodes of a path, tree) of all rows that drafted."""
        return [
            (index, row, text, allowed[row], tree)
            for index, (texts, allowed, tree) in enumerate(self.steps)
            for row, text in enumerate(texts)
            if allowed[row] > 0
        ]


def paths_of(tree: Drafts, row: int) -> list[Path | None]:
    """The tokens from the root down to each node; None: it does not count, as it or an ancestor has no token."""
    parents, paths = tree.parents if tree.parents.dim() == 1 else tree.parents[row], list[Path | None]()
    for token, parent in zip(tree.tokens[row].tolist(), parents.tolist(), strict=True):
        before = () if parent < 0 else paths[parent]
        paths.append(None if token < 0 or before is None else (*before, token))
    return paths


def likely_paths(rows_of: Rows, text: list[int], depth: int, nodes: int, width: int) -> list[Path]:
    """EAGLE-2's tree (arXiv 2406.16858, section 4): at each depth the ``width`` paths with the largest joint
    probability each get their ``width`` most likely children, and of all the ``nodes`` most probable remain."""
    leaves: list[tuple[float, Path]] = [(0.0, ())]
    found: list[tuple[float, Path]] = []
    for _ in range(depth):
        proposed = []
        rows = rows_of(text, [path for _, path in leaves]).log_softmax(-1)
        for (joint, path), row in zip(leaves, rows, strict=True):
            best = row.sort(descending=True, stable=True)
            for log_q, token in zip(best.values[:width].tolist(), best.indices[:width].tolist(), strict=True):
                proposed.append((joint + log_q, (*path, token)))
        found += proposed
        leaves = sorted(proposed, key=lambda each: -each[0])[:width]
    return [path for _, path in sorted(found, key=lambda each: -each[0])[:nodes]]
