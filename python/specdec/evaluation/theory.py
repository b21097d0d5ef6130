"""What speculative decoding should gain, by Leviathan et al., "Fast Inference from Transformers via Speculative
Decoding" (arXiv 2211.17192), and the same for trees and for measured times of steps.

The paper's terms: ``alpha`` is the mean acceptance rate of a draft that is tested (definition 3.1), ``k`` its gamma,
``c`` the time of one draft forward over that of one target forward (definition 3.7), ``c_hat`` the same in arithmetic
operations a token (definition 3.10). It assumes that drafts are accepted independently of each other and of their
position, and that a target forward over k + 1 tokens takes as long as one over a single token. Neither is exactly
true, so ``specdec bench`` puts the prediction beside what it measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..checks import read_count, refuse


def expected_tau(alpha: float, k: int) -> float:
    """Returns the mean number of tokens that a step emits: (1 - alpha^(k+1)) / (1 - alpha), equation (1) of the paper.

    Args:
        alpha: from 0 to 1. With 0 every step emits one token, with 1 it emits k + 1.
        k: drafts a step, >= 0.

    Raises:
        ValueError: names the argument.
    """
    check_rate("alpha", alpha)
    return tau_by_position([alpha] * read_count("k", k))


def tau_by_position(alphas: Sequence[float]) -> float:
    """The same where the i-th draft of a step is accepted with probability ``alphas[i]`` if those before it were. This
    drops the assumption that all positions are alike, but not that steps are."""
    reached, tau = 1.0, [1.0]
    for alpha in alphas:
        reached *= check_rate("alphas", alpha)
        tau.append(reached)
    return math.fsum(tau)


def expected_speedup(alpha: float, c: float, k: int) -> float:
    """Returns how many times as fast as plain decoding a text is decoded: expected_tau / (k c + 1), theorem 3.8. Below
    1 it is slower.

    Args:
        c: >= 0; 0 is a draft that takes no time.
    """
    return speedup_of_steps(expected_tau(alpha, k), k * check_cost("c", c) + 1.0, 1.0)


def speedup_of_steps(tau: float, step: float, plain: float) -> float:
    """Returns the same for measured times. They include what c leaves out: a target forward over more tokens takes
    longer, and a step has a loop around it.

    Args:
        tau: tokens that a step emits on average.
        step: the time of a step with drafts.
        plain: the time of a step without, in the same unit, > 0.
    """
    return tau * plain / step


def best_k(alpha: float, c: float, most: int) -> int:
    """Returns the k from 0 to ``most`` with the largest ``expected_speedup``; among equal ones the smallest. By
    corollary 3.9 it is 0 exactly where alpha <= c: drafting then does not pay, whatever k is."""
    read_count("most", most)
    return max(range(most + 1), key=lambda k: expected_speedup(alpha, c, k))


def sure_speedup(alpha: float, c: float) -> float:
    """Returns what the best k gains at least: by corollary 3.9, the (1 + alpha) / (1 + c) of k = 1 where alpha > c;
    otherwise 1, without drafts."""
    return max(expected_speedup(alpha, c, 1), 1.0)


# ---- Trees


def children_alike(alpha: float, width: int) -> tuple[float, ...]:
    """Returns the probability that the first, second, ... of ``width`` siblings is accepted, if each that is tested is
    accepted with ``alpha`` and is tested where all before it were rejected: alpha (1 - alpha)^i. SpecInfer (Miao et
    al., arXiv 2305.09781) tests siblings in this manner; in truth later ones are accepted less often."""
    check_rate("alpha", alpha)
    return tuple(alpha * (1 - alpha) ** i for i in range(read_count("width", width)))


def expected_tree_tau(acceptance: Sequence[float], parents: Sequence[int]) -> float:
    """Returns the mean number of tokens that a step with a tree emits, if the i-th child of every accepted node is
    accepted with ``acceptance[i]`` (Sequoia, Chen et al., arXiv 2402.12374, section 3.1): 1 and, for each node, the
    product along its path. A chain with acceptance (alpha,) gives ``expected_tau``.

    Args:
        acceptance: from 0 to 1, together at most 1; as many as the most children of a node, or more.
        parents: of each node, -1 for the root; before their children.
    """
    if math.fsum(check_rate("acceptance", a) for a in acceptance) > 1 + 1e-9:
        refuse("acceptance", list(acceptance), "numbers whose sum is at most 1: one child is accepted, or none")
    reached, children = [1.0], [0] * (len(parents) + 1)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            refuse("parents", list(parents), "of each node, -1 or a node before it")
        rank = children[parent + 1]
        if rank >= len(acceptance):
            refuse("acceptance", list(acceptance), f"one number for each of the {rank + 1} children of a node")
        children[parent + 1] += 1
        reached.append(reached[parent + 1] * acceptance[rank])
    return math.fsum(reached)


# ---- Checks


def check_rate(name: str, value: float) -> float:
    if not 0 <= value <= 1:  # NaN is refused as well
        refuse(name, value, "a number from 0 to 1")
    return value


def check_cost(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        refuse(name, value, "a finite number >= 0")
    return value
