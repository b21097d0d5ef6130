"""The shape of a tree whose children are sampled. Which nodes have how many children must not depend on what was
drawn, so it is decided before."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..models.cache.tree import Tree


@functools.lru_cache
def best_shape(nodes: int, depth: int, acceptance: tuple[float, ...]) -> tuple[int, ...]:
    """Returns the parents of the tree of which the most nodes are accepted on average, if the i-th child of every node
    is accepted with probability ``acceptance[i]`` once that node is (Sequoia, Chen et al., arXiv 2402.12374, section
    3.1). A node is then accepted with the product along its path. These products fall from a node to its children and
    to its next sibling, so the best tree has the largest of them.

    Args:
        nodes: the most nodes, >= 0.
        depth: the most nodes of a path, >= 0.
        acceptance: from 0 to 1, not ascending; a node has no more children than these.

    Returns:
        The parent of each node, or -1 for the root, level by level and siblings side by side.
    """
    chosen: list[tuple[int, ...]] = []  # of each node, which child it and its ancestors are
    open_nodes: list[tuple[float, tuple[int, ...]]] = [(-math.log(acceptance[0]), (0,))] if depth else []
    while open_nodes and len(chosen) < nodes:
        cost, path = heapq.heappop(open_nodes)
        chosen.append(path)
        if path[-1] + 1 < len(acceptance):
            sibling = cost + math.log(acceptance[path[-1]]) - math.log(acceptance[path[-1] + 1])
            heapq.heappush(open_nodes, (sibling, (*path[:-1], path[-1] + 1)))
        if len(path) < depth:
            heapq.heappush(open_nodes, (cost - math.log(acceptance[0]), (*path, 0)))
    chosen.sort(key=lambda path: (len(path), path))
    numbers = {path: number for number, path in enumerate(chosen)}
    return tuple(numbers.get(path[:-1], -1) for path in chosen)


class LevelShape(NamedTuple):
    """The m nodes of one depth that have children. At depth 0 that is the root, whose number is -1."""

    numbers: torch.Tensor  # [m] int64
    parents: torch.Tensor  # [1, m] int64: which of the m nodes of the level before each one follows
    paths: torch.Tensor  # [m, depth] int64: the nodes from the root's child down to each
    tree: Tree  # of all nodes up to this depth; these are fed
    width: int  # the most children of one of them
    children: torch.Tensor  # [k] int64: where the next level's nodes, in their order, are among m x width drawn ones


def levels(parents: Sequence[int], device: torch.device) -> list[LevelShape]:
    """Returns the levels of the tree of ``parents``, which are in the order of ``best_shape``."""
    paths: list[list[int]] = [[]]  # of the root and each node
    for node, parent in enumerate(parents):
        paths.append([*paths[parent + 1], node])
    inner = sorted({*parents} | {-1})
    shapes: list[LevelShape] = []
    before: list[int] = []

    def on_device(values: list, *shape: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).view(*shape).to(device)

    for depth in range(1 + max(len(path) for path in paths)):
        numbers = [node for node in inner if len(paths[node + 1]) == depth]
        if not numbers:
            break
        last = sum(len(path) <= depth for path in paths) - 1  # nodes up to this depth
        whole = Tree.of(on_device(list(parents[:last]), -1))
        fed = on_device([n + 1 for n in numbers], -1)
        of_each = [[child for child, parent in enumerate(parents) if parent == node] for node in numbers]
        width = max(map(len, of_each))
        shapes.append(
            LevelShape(
                numbers=fed - 1,
                parents=on_device([before.index(parents[n]) if n >= 0 else 0 for n in numbers], 1, -1),
                paths=on_device([paths[n + 1] for n in numbers], len(numbers), depth),
                tree=Tree(whole.depths, whole.ancestors[:, fed]),
                width=width,
                children=on_device([i * width + j for i, each in enumerate(of_each) for j in range(len(each))], -1),
            )
        )
        before = numbers
    return shapes
