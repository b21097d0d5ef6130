"""Which nodes a tree has, if the distribution of each depth does not depend on the tokens before.

A path is named by the ranks of its tokens: (0, 2) is the third of the second tokens, after the first of the first ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from ..checks import refuse

MOST_RANKS = 1024  # what ``draft_children`` draws at most
Path = tuple[int, ...]


class BestPaths:
    """The ``nodes`` most probable paths, where the probability of a path is the product of its tokens' (DDTree, arXiv
    2604.12989). The prefix of a path is at least as probable, so it is among them. Of equally probable paths the
    shorter ones are taken first.

    Args:
        chain: so many nodes are the most likely token of each depth, whatever their probability. A product does not
            know that the tokens of a path go together, so it is too small for the long ones.

    Attributes:
        width: how many tokens of each depth can be part of these paths.
    """

    def __init__(self, nodes: int, device: torch.device, chain: int = 0):
        self.nodes, self.width, self.chain = nodes, min(nodes, MOST_RANKS), chain
        # Of the paths that end in token j after prefix i, both in falling order, (i + 1) (j + 1) - 1 are no worse.
        pairs = [(i, j) for i in range(nodes) for j in range(min(nodes // (i + 1), self.width))]
        self.prefix, self.rank = torch.tensor(pairs, device=device).T

    def choose(self, tokens: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns tokens and parents of the nodes, [B, N] int64 each, as in ``Drafts``; tokens are -1 where there
        are fewer paths. Nothing waits for the device.

        Args:
            tokens: [B, K, width] int64, of each depth the most likely first; -1 where there are no more.
            log_q: [B, K, width], their log-probabilities; -inf where there is no token.
        """
        nodes, log_q = self.nodes, log_q.clamp(max=0)  # rounding must not put a path before its prefix
        scores = pad(log_q.new_zeros(len(log_q), 1), (0, nodes - 1), value=-torch.inf)
        each_scores, each_tokens, each_parents = [], [], []
        for depth in range(log_q.shape[1]):
            # The best paths of this depth begin with the best ones of the depth before.
            scores, order = _best(scores[:, self.prefix] + log_q[:, depth, self.rank], nodes)
            each_scores.append(scores)
            each_tokens.append(tokens[:, depth].gather(1, self.rank[order]))
            each_parents.append((depth - 1) * nodes + self.prefix[order])
        scores = torch.cat(each_scores, 1)
        first = scores[:, : self.chain * nodes : nodes]  # the best path of each depth has the most likely tokens
        first.masked_fill_(first > -torch.inf, 1.0)  # more than any logarithm
        scores, order = _best(scores, nodes)
        place = order.new_full((len(order), log_q.shape[1] * nodes), -1)
        place.scatter_(1, order, torch.arange(nodes, device=order.device).expand_as(order))
        parents = torch.cat(each_parents, 1).gather(1, order)
        parents = torch.where(parents < 0, -1, place.gather(1, parents.clamp(min=0)))
        return torch.cat(each_tokens, 1).gather(1, order).where(scores > -torch.inf, -1), parents


def _best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the largest ``count`` of each row and their columns. Equal ones stay in their order, so that a path
    comes after its prefix."""
    values, order = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :count], order[:, :count]


class StaticPaths:
    """The same paths in every step, parents before children and siblings by rank.

    Attributes:
        width: how many tokens of each depth are part of these paths, by their ranks.
        rows: of the root and each node: its path from the root, as numbers of nodes, and the numbers of its children.
    """

    def __init__(self, paths: Sequence[Path], device: torch.device):
        number = {path: i for i, path in enumerate(paths)}
        parents = [number.get(path[:-1], -1) for path in paths]
        self.width, self.longest = max(path[-1] for path in paths) + 1, len(paths[-1])
        self.rows: list[tuple[list[int], list[int]]] = [([], [i for i, parent in enumerate(parents) if parent == -1])]
        for path in paths:
            nodes = [number[path[:length]] for length in range(1, len(path) + 1)]
            self.rows.append((nodes, [i for i, parent in enumerate(parents) if parent == nodes[-1]]))
        self.parents = torch.tensor(parents, device=device)
        self._depth, self._rank = torch.tensor([(len(path) - 1, path[-1]) for path in paths], device=device).T

    def choose(self, tokens: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`BestPaths.choose`. Of the probabilities it only matters that there is a token."""
        tokens = tokens.where(log_q > -torch.inf, -1)
        tokens = pad(tokens, (0, 0, 0, max(self.longest - tokens.shape[1], 0)), value=-1)
        return tokens[:, self._depth, self._rank], self.parents.expand(len(tokens), -1)


def read_paths(name: str, given: object, longest: int | None, columns: int) -> list[Path]:
    """Returns the paths of a static tree in the order of :class:`StaticPaths`.

    Args:
        name: of the argument, for errors.
        given: a sequence of sequences of ranks, such as [[0], [0, 0], [1], [0, 1]].
        longest: the most tokens of a path; None: any number.
        columns: the tokens of a distribution.

    Raises:
        ValueError: a path is empty, too long, there twice or without its prefix, or a rank is out of range.
    """
    most = min(columns, MOST_RANKS)
    allowed = f"a list of paths of 1 to {longest or 'any number of'} ranks from 0 to {most - 1}"
    if not isinstance(given, Sequence) or not given or not all(isinstance(path, Sequence) for path in given):
        refuse(name, repr(given), allowed)
    for path in given:
        ranks = all(isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < most for rank in path)
        if not path or len(path) > (longest or len(path)) or not ranks:
            refuse(name, f"the path {list(path)}", allowed)
    paths = sorted((tuple(path) for path in given), key=lambda path: (len(path), path))
    for path, after in zip(paths, [*paths[1:], ()], strict=True):
        if len(path) > 1 and path[:-1] not in paths:
            refuse(name, f"the path {list(path)} without {list(path[:-1])}", "every path with all its prefixes")
        if path == after:
            refuse(name, f"the path {list(path)} twice", "each path once")
    return paths


def likely_paths(nodes: int, depth: int, acceptance: float) -> list[Path]:
    """Returns the ``nodes`` best paths of up to ``depth`` tokens, if a node's children are accepted with this
    probability each, given that those before it were not."""
    width = min(nodes, MOST_RANKS)
    rank = torch.arange(width).expand(1, depth, -1)
    log_q = math.log(acceptance) + math.log1p(-acceptance) * rank.double()
    ranks, parents = (part[0].tolist() for part in BestPaths(nodes, rank.device).choose(rank, log_q))
    paths: list[Path] = []
    for child, parent in zip(ranks, parents, strict=True):
        if child < 0:  # there are no more, and all that follow are none
            break
        paths.append((*(() if parent < 0 else paths[parent]), child))
    return sorted(paths, key=lambda path: (len(path), path))
