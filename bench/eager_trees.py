"""The rules of trees as one would write them in PyTorch: peers of ``verify_tree``. They are correct, take one sequence,
read a row when they get to it, and decide on the host, which reads one number for each child.

Target and draft are raw logits [N + 1, V] at temperature 1, row 0 of the root and 1 + i of node i; ``children`` are the
nodes below each row. Each rule returns (accepted nodes, the token after them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from peers import probabilities

Children = Sequence[Sequence[int]]
Emitted = tuple[list[int], int]


class Rows:
    """Softmaxes of rows, and how many were computed."""

    def __init__(self, logits: torch.Tensor):
        self.logits, self.read = logits, 0

    def __getitem__(self, row: int) -> torch.Tensor:
        self.read += 1
        return probabilities(self.logits[row])


def race(weights: torch.Tensor) -> int:
    return int((weights / torch.empty_like(weights).exponential_()).argmax())


def less_the_child(q: torch.Tensor, x: int) -> torch.Tensor:
    q[x] = 0
    return q / q.sum()


def walk(p: Rows, q: Rows, tokens: Sequence[int], children: Children) -> Emitted:
    """Rule ``walk``: goes on to the child that holds the token drawn from p."""
    path: list[int] = []
    row = 0
    while True:
        drawn = race(p[row])
        child = next((c for c in children[row] if tokens[c] == drawn), None)
        if child is None:
            return path, drawn
        path.append(child)
        row = 1 + child


def multi_round(p: Rows, q: Rows, tokens: Sequence[int], children: Children) -> Emitted:
    """Rule ``token``: SpecInfer (arXiv 2305.09781) with draws without replacement (Sequoia, arXiv 2402.12374)."""
    path: list[int] = []
    row = 0
    while True:
        here = p[row]
        of_child = q[row] if children[row] else None
        for child in children[row]:
            x = tokens[child]
            residual = None
            if not torch.rand(()) * of_child[x] < here[x]:
                residual = (here - of_child).clamp(min=0)
            if residual is None or residual.sum() == 0:  # p and q are equal up to rounding
                path.append(child)
                row = 1 + child
                break
            here, of_child = residual / residual.sum(), less_the_child(of_child, x)
        else:
            return path, race(here)


def traversal(p: Rows, q: Rows, tokens: Sequence[int], children: Children) -> Emitted:
    """Rule ``block``: Traversal verification (arXiv 2505.12398)."""

    def visit(row: int, h: float) -> Emitted | None:
        below = children[row] if h > 0 else ()
        if below:
            here, of_child = p[row], q[row]
        for child in below:
            x = tokens[child]
            if (kept := visit(1 + child, min(1.0, float(h * here[x] / of_child[x])))) is not None:
                return [child, *kept[0]], kept[1]
            residual = (h * here - of_child).clamp(min=0)
            mass = float(residual.sum())
            h = mass / (mass + 1 - h) if mass > 0 or h < 1 else 1.0
            if mass > 0:
                here = residual / mass
            of_child = less_the_child(of_child, x)
            if h == 0:
                break
        if row > 0 and not torch.rand(()) < h:
            return None
        return [], race(here if below else p[row])

    emitted = visit(0, 1.0)
    assert emitted is not None, "the root is always kept"
    return emitted


RULES: dict[str, Callable[[Rows, Rows, Sequence[int], Children], Emitted]] = {
    "walk": walk,
    "token": multi_round,
    "block": traversal,
}
