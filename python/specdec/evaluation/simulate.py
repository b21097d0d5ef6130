"""Speculative decoding without a model: what theory.py says of an acceptance and of costs, and a run of random numbers
that does what it assumes, to see that they agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from ..checks import read_count
from . import theory

MOST_SIBLINGS = 8  # that a node of a tree has; the ninth of alike siblings is hardly ever needed


@dataclass(frozen=True)
class SampleMean:
    """A mean of the random run, and its standard error."""

    mean: float
    error: float


@dataclass(frozen=True)
class Simulation:
    """One K, by the formulas and by random numbers.

    Attributes:
        num_drafts: K; of a tree the longest path.
        nodes: drafted tokens that a step verifies: K, or the nodes of the tree.
        tau, speedup: theory.expected_tau (for trees, expected_tree_tau) and theorem 3.8. A tree is drafted level by
            level, in as many draft forwards as its longest path has nodes.
        operations: theorem 3.11; for a tree with its nodes instead of K.
    """

    num_drafts: int
    nodes: int
    tau: float
    speedup: float
    operations: float
    simulated_tau: SampleMean
    simulated_speedup: SampleMean
    simulated_operations: SampleMean

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def simulate(
    alpha: float, c: float, num_drafts: int, c_hat: float, steps: int = 100_000, seed: int = 0, tree: int | None = None
) -> Simulation:
    """Compares the formulas with ``steps`` steps of random numbers.

    Of a tree, the children of an accepted node are tested in their order until one is accepted, each with probability
    ``alpha``, independently of all others. Its shape is the best for that acceptance
    (:func:`specdec.drafters.tree_shape.best_shape`).

    Args:
        alpha: from 0 to 1.
        c, c_hat: time and operations of a draft forward, over those of a target forward, >= 0.
        num_drafts: K >= 0; of a tree, the most nodes of a path.
        steps: >= 2.
        tree: the most nodes of a tree, >= 1; None: a chain.

    Raises:
        ValueError: names the argument.
    """
    read_count("num_drafts", num_drafts)
    read_count("steps", steps, 2)
    theory.check_cost("c", c)
    theory.check_cost("c_hat", c_hat)
    acceptance = [a for a in theory.children_alike(alpha, MOST_SIBLINGS) if a > 0]
    parents: Sequence[int] = range(-1, num_drafts - 1)
    if tree is not None:
        from ..drafters.tree_shape import best_shape  # imports transformers, which takes seconds

        read_count("tree", tree, 1)
        parents = best_shape(tree, num_drafts, tuple(acceptance)) if acceptance else ()
    depth, nodes = _depth(parents), len(parents)
    tau = theory.expected_tau(alpha, num_drafts) if tree is None else theory.expected_tree_tau(acceptance, parents)
    step_time, step_operations = depth * c + 1, nodes * c_hat + nodes + 1
    emitted = draw_emitted(alpha, parents, steps, seed)
    mean, error = float(emitted.mean()), float(emitted.std(ddof=1)) / math.sqrt(steps)
    # By the delta method: a small relative error of tau is that of the quotient.
    operations = step_operations / mean
    return Simulation(
        num_drafts=num_drafts,
        nodes=nodes,
        tau=tau,
        speedup=theory.speedup_of_steps(tau, step_time, 1.0),
        operations=step_operations / tau,
        simulated_tau=SampleMean(mean, error),
        simulated_speedup=SampleMean(mean / step_time, error / step_time),
        simulated_operations=SampleMean(operations, operations * error / mean),
    )


def draw_emitted(alpha: float, parents: Sequence[int], steps: int, seed: int) -> np.ndarray:
    """Returns how many tokens each of ``steps`` steps emits, float64: the accepted nodes of a path, and one more.

    Args:
        parents: of each node, -1 for the root; before their children.
    """
    random = np.random.default_rng(seed)
    emitted, reached = np.ones(steps), [np.ones(steps, bool)]  # of the root and each node, whether it was accepted
    rejected = [np.ones(steps, bool) for _ in range(len(parents) + 1)]  # whether all its children so far were
    for parent in parents:
        accepted = reached[parent + 1] & rejected[parent + 1] & (random.random(steps) < alpha)
        rejected[parent + 1] &= ~accepted
        reached.append(accepted)
        emitted += accepted
    return emitted


def _depth(parents: Sequence[int]) -> int:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return max(depths)
