"""Exact distributions of what a step with a tree emits, as plain loops after the published pseudo-code. They share no
code with any backend.

A tree is a list of parents: that of every node, -1 for the root; parents come before their children.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .distributions import Distribution, Model


def children_of(parents: Sequence[int], node: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node]


def draws(q: np.ndarray, count: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every outcome of ``count`` draws from q without replacement, with its probability; -1 when q has no more."""
    if count == 0:
        yield (), 1.0
    elif q.sum() == 0:
        yield (-1,) * count, 1.0
    else:
        for x in np.flatnonzero(q):
            rest = np.where(np.arange(len(q)) == x, 0.0, q)
            for others, probability in draws(rest, count - 1):
                yield (int(x), *others), float(q[x] / q.sum()) * probability


def _normalised(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum() if weights.sum() > 0 else weights


def walk_distribution(
    target: Model, best: Callable[[tuple[int, ...], int], list[int]], parents: Sequence[int], prefix=(), node: int = -1
) -> Distribution:
    """Of rule ``walk``: draws a token from the target at a node, and goes on to the child that holds it. ``best(text,
    n)`` are the n children of a node."""
    distribution: Distribution = defaultdict(float)
    children = children_of(parents, node)
    tokens = best(prefix, len(children))
    for t, probability in enumerate(target(prefix)):
        if t in tokens:
            below = walk_distribution(target, best, parents, (*prefix, t), children[tokens.index(t)])
            for rest, mass in below.items():
                distribution[(t, *rest)] += float(probability) * mass
        elif probability > 0:
            distribution[(t,)] += float(probability)
    return dict(distribution)


def multi_round_distribution(
    target: Model, draft: Model, parents: Sequence[int], prefix: tuple[int, ...] = (), node: int = -1
) -> Distribution:
    """Of rule ``token``: SpecInfer's multi-round speculative sampling (arXiv 2305.09781, Algorithm 2), with children
    that were drawn without replacement as in Sequoia (arXiv 2402.12374, Algorithm 2)."""
    distribution: Distribution = defaultdict(float)
    children = children_of(parents, node)
    for tokens, reached in draws(draft(prefix), len(children)):
        p, q = target(prefix), draft(prefix)
        for child, x in zip(children, tokens, strict=True):
            if x < 0 or reached == 0:
                continue
            accept = min(1.0, float(p[x] / q[x]))
            if accept > 0:
                below = multi_round_distribution(target, draft, parents, (*prefix, x), child)
                for rest, mass in below.items():
                    distribution[(x, *rest)] += reached * accept * mass
            reached *= 1 - accept
            p = _normalised(np.maximum(p - q, 0))
            q = _normalised(np.where(np.arange(len(q)) == x, 0.0, q))
        for t in np.flatnonzero(p):
            if reached > 0:
                distribution[(int(t),)] += reached * float(p[t])
    return dict(distribution)


def traversal_distribution(
    target: Model, draft: Model, parents: Sequence[int], prefix: tuple[int, ...] = ()
) -> Distribution:
    """Of rule ``block``: Traversal verification (arXiv 2505.12398), with children drawn without replacement."""
    kept, _ = _traversal(target, draft, parents, prefix, -1, 1.0)
    return kept


def _traversal(
    target: Model, draft: Model, parents: Sequence[int], text: tuple[int, ...], node: int, ratio: float
) -> tuple[Distribution, float]:
    """(what follows ``text`` if the path ends at this node or below, the probability that it does not)."""
    distribution: Distribution = defaultdict(float)
    children, failed = children_of(parents, node), 0.0
    for tokens, reached in draws(draft(text), len(children)):
        p, q, h = target(text), draft(text), ratio
        for child, x in zip(children, tokens, strict=True):
            if x < 0 or reached == 0:
                continue
            below, fails = _traversal(target, draft, parents, (*text, x), child, min(1.0, h * float(p[x] / q[x])))
            for rest, mass in below.items():
                distribution[(x, *rest)] += reached * mass
            reached *= fails
            residual = np.maximum(h * p - q, 0)
            mass = float(residual.sum())
            h = mass / (mass + (1 - h)) if mass > 0 else float(h == 1)
            p = _normalised(residual)
            q = _normalised(np.where(np.arange(len(q)) == x, 0.0, q))
        keep = 1.0 if node < 0 else h
        for t in np.flatnonzero(p):
            if reached * keep > 0:
                distribution[(int(t),)] += reached * keep * float(p[t])
        failed += reached * (1 - keep)
    return dict(distribution), failed
