"""Trees that a model grows level by level: the nodes of a level are fed in one forward, and get children.

There is no model here. A session feeds the root, and then level after level, and hands over the logits::

    growing = growth.begin(step, depth)
    growing.take(logits_of_the_root)
    while (level := growing.next()) is not None:
        growing.take(logits_of(level))
    tree = growth.tree(growing, forwards)

For greedy text, children are the most likely tokens, and the nodes with the largest joint probabilities are fed and, at
the end, verified: EAGLE-2's dynamic tree (Li et al., arXiv 2406.16858, section 4). Where children are drawn, the shape
is fixed before (``tree_shape.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from specdec_kernels import DraftChildren, draft_children

from ..checks import read_count, refuse
from ..models.cache.kv_cache import visible_slots
from ..models.cache.tree import Tree
from .drawing import first_arrivals, keeps_q
from .protocol import BatchState, Drafts, Step
from .tree_shape import LevelShape, best_shape, levels


@dataclass(frozen=True)
class TreeGrowth:
    """How a model grows a tree of N nodes, of paths of up to K.

    Args:
        width: for greedy text, how many nodes of a level are fed, each of which proposes as many children, 1 to 1024.
            With 1 the tree is a chain. None: N / K, from 2 to 10. EAGLE-2 has 10, with N = 59 and K = 8.
        acceptance: for sampled text, a guess of the probability that the first, the second, ... child of a node is
            accepted, above 0 and below 1, not ascending. The best tree for it is grown, so a node has at most as many
            children. The default was measured with the embedded pair.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """

    width: int | None = None
    acceptance: tuple[float, ...] = (0.7, 0.15, 0.06, 0.03, 0.015, 0.01)

    def __post_init__(self) -> None:
        if self.width is not None and read_count("width", self.width, 1) > 1024:
            refuse("width", self.width, "an integer from 1 to 1024")
        guess = tuple(self.acceptance)
        if not guess or not all(0 < p < 1 for p in guess) or list(guess) != sorted(guess, reverse=True):
            refuse("acceptance", repr(self.acceptance), "numbers above 0 and below 1 that do not ascend")
        object.__setattr__(self, "acceptance", guess)

    def width_of(self, nodes: int, depth: int) -> int:
        """Returns the width for N and K, both >= 1."""
        return self.width or min(max(-(-nodes // depth), 2), 10)

    def slots(self, nodes: int, depth: int) -> int:
        """Returns how many slots after a text the model's cache needs for N and K: one for each node that is fed, if
        children are the most likely tokens, and for each node of the tree, if they are sampled."""
        return max(nodes, self.width_of(nodes, depth) * (min(nodes, depth) - 1)) if nodes and depth else nodes


class Level(NamedTuple):
    """The nodes of one depth that are fed next, m of each sequence. Node number e goes to slot e + 1 after the
    root's."""

    tokens: torch.Tensor  # [B, m] int64, in range even where there is no such node
    parents: torch.Tensor  # [B, m] or [1, m] int64: which of the nodes of the level before (or the root) it follows
    numbers: torch.Tensor  # [m] int64
    depth: int  # >= 1
    counts: torch.Tensor  # [B, 1] bool: whether the sequence may have nodes below these
    tree: Tree  # of all nodes that were fed or skipped up to these; without its root

    def places(self, root: torch.Tensor, trash: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns positions and slots, [B, m] int64 each, for roots at ``root`` [B] int64. The slots of those that do
        not count are ``trash``."""
        positions = (root + self.depth)[:, None].expand(-1, len(self.numbers))
        return positions, torch.where(self.counts, root[:, None] + 1 + self.numbers, trash)


class Growing(Protocol):
    """A tree of each sequence while it grows."""

    def take(self, logits: torch.Tensor) -> None:
        """Takes the logits [B, m, columns] of the nodes that were fed, of the root at first."""

    def next(self) -> Level | None:
        """Returns the nodes to be fed next; None: the tree is grown."""

    def tree(self) -> tuple[Drafts, torch.Tensor | None]:
        """Returns the tree, and the number under which each of its nodes was fed, [B, N] int64, or -1. None: its
        own."""


class Growth:
    """Grows the trees of a batch, step by step. All shapes follow from N and K alone.

    Args:
        d2t: [columns] int64, ascending: the target's ids of the columns of the logits; None: they are the same ids.
    """

    def __init__(self, options: TreeGrowth, batch: BatchState, d2t: torch.Tensor | None = None):
        self.options, self.batch, self.d2t = options, batch, d2t
        self._shapes: dict[int, list[LevelShape]] = {}  # by N; kept because captured steps read them
        self._fed: torch.Tensor | None = None
        self._statuses: list[torch.Tensor] = []  # of the step's draws

    def begin(self, step: Step, depth: int) -> Growing:
        """Begins a step's trees of paths of up to ``depth`` >= 1, at most K."""
        batch, options, children = self.batch, self.options, _Children(self.batch, step, self.d2t)
        self._statuses = children.statuses
        nodes, most = batch.nodes, batch.most_drafts
        if step.greedy:
            return LikelyTree(children, min(depth, nodes), nodes, options.width_of(nodes, most))
        if nodes not in self._shapes:
            self._shapes[nodes] = levels(best_shape(nodes, most, options.acceptance), step.position.device)
        return ShapedTree(children, self._shapes[nodes][:depth])

    def tree(self, growing: Growing, forwards: int) -> Drafts:
        """Returns the step's tree, which took ``forwards`` forwards."""
        tree, self._fed = growing.tree()
        return tree.with_faults(self._statuses)._replace(forwards=forwards)

    def fed(self, path: torch.Tensor) -> torch.Tensor:
        """Returns the numbers under which the nodes of ``path`` [B, D] int64, of the last tree, were fed. -1: there is
        none, or it was not fed, which may be so of the last one."""
        if self._fed is None:
            return path
        return torch.where(path >= 0, self._fed.gather(1, path.clamp(min=0)), -1)

    def visible(self, step: Step, capacity: int) -> int:
        """Returns how many slots attention reads, so that all nodes are among them."""
        nodes = self.batch.nodes
        more = self.options.slots(nodes, self.batch.most_drafts) - nodes
        return visible_slots(step.visible + more, capacity)


class LikelyTree:
    """Feeds at every depth the ``width`` nodes with the largest joint probability, each of which proposes its ``width``
    most likely children, and takes in the end the ``nodes`` with the largest of all that were proposed. At equal
    probabilities the node that was proposed first counts, so a node never comes without its ancestors."""

    def __init__(self, children: _Children, depth: int, nodes: int, width: int):
        self.children, self.most, self.nodes, self.width = children, depth, nodes, width
        position = children.step.position
        batch, device = len(position), position.device
        self.depth, self.fed = 0, 0  # of the nodes that are fed; how many were fed before them
        # Of these nodes: the log of their joint probability, their numbers among the proposed ones, and their paths.
        self.joint = torch.zeros(batch, 1, device=device)
        self.index = torch.full((batch, 1), -1, device=device)
        self.paths = position.new_empty(batch, 1, 0)
        self.depths = position.new_zeros(1)
        self.ancestors = torch.ones(batch, 1, 1, dtype=torch.bool, device=device)
        # Of the proposed nodes [B, n] by depth: token, joint probability, parent's index, and number if it is fed.
        self.proposed: list[tuple[torch.Tensor, ...]] = []

    def take(self, logits: torch.Tensor) -> None:
        drawn = self.children.draw(logits, self.width, self.paths)
        tokens, log_q = (part.unflatten(0, logits.shape[:2]) for part in drawn[:2])
        allowed = self.children.step.allowed_on_device > self.depth
        # A log q above 0, by rounding, would make a node more likely than its parent.
        joint = self.joint[..., None] + torch.where(tokens < 0, -torch.inf, log_q.clamp(max=0.0))
        joint = torch.where(allowed[:, None, None], joint, -torch.inf)
        parents = self.index[..., None].expand_as(tokens)
        children = tokens.flatten(1), joint.flatten(1), parents.flatten(1)
        self.proposed.append((*children, torch.full_like(children[0], -1)))

    def next(self) -> Level | None:
        self.depth += 1
        if self.depth >= self.most:
            return None
        tokens, joint, _, numbers = self.proposed[-1]
        first = sum(tokens.shape[1] for tokens, *_ in self.proposed[:-1])
        best = _largest(joint, self.width)
        number = torch.arange(best.shape[1], device=best.device) + self.fed
        numbers.scatter_(1, best, number.expand_as(best))
        tokens, parents = tokens.gather(1, best).clamp(min=0), best // self.width
        self.joint, self.index, self.fed = joint.gather(1, best), best + first, self.fed + best.shape[1]
        self.paths = torch.cat((_rows(self.paths, parents), tokens[..., None]), 2)
        itself = torch.eye(best.shape[1], dtype=torch.bool, device=best.device).expand(len(best), -1, -1)
        self.ancestors = torch.cat((_rows(self.ancestors, parents), itself), 2)
        self.depths = torch.nn.functional.pad(self.depths, (0, best.shape[1]), value=self.depth)
        tree = Tree(self.depths.expand(len(best), -1), self.ancestors)
        counts = self.children.step.allowed_on_device[:, None] > self.depth
        return Level(tokens, parents, number, self.depth, counts, tree)

    def tree(self) -> tuple[Drafts, torch.Tensor]:
        tokens, joint, parents, numbers = (torch.cat(parts, 1) for parts in zip(*self.proposed, strict=True))
        best = _largest(joint, self.nodes)
        number = torch.arange(best.shape[1], device=best.device).expand_as(best)
        nodes = torch.full_like(tokens, -1).scatter(1, best, number)
        parents = parents.gather(1, best)
        parents = torch.where(parents < 0, -1, nodes.gather(1, parents.clamp(min=0)))
        tokens = torch.where(joint.gather(1, best) > -torch.inf, tokens.gather(1, best), -1)
        return Drafts(tokens, parents), numbers.gather(1, best)


class ShapedTree:
    """Feeds the nodes of each level that have children, as many as ``shape`` says.

    With rules ``token`` and ``block``, children are sampled without replacement. With ``coupled`` they are the first
    arrivals of the race that verification runs as well, so that they often are the target's own. They may share its
    random numbers there, since the text is that of plain sampling whatever the tree."""

    def __init__(self, children: _Children, shape: list[LevelShape]):
        self.children, self.shape, self.depth = children, shape, 0
        self.tokens = children.step.last_two[:, :0]
        self.logits: list[torch.Tensor] = []

    def take(self, logits: torch.Tensor) -> None:
        level = self.shape[self.depth]
        paths = self.tokens[:, level.paths]
        if keeps_q(self.children.batch, self.children.step):
            drawn = self.children.draw(logits, level.width, paths, offset=level.numbers + 1).tokens
            self.logits.append(logits)
        else:
            drawn = self.children.draw_coupled(logits, level.width, paths)
        tokens = drawn.view(len(logits), -1).index_select(1, level.children)
        self.tokens = torch.cat((self.tokens, tokens), 1)

    def next(self) -> Level | None:
        self.depth += 1
        if self.depth >= len(self.shape):
            return None
        level = self.shape[self.depth]
        tokens = self.tokens.index_select(1, level.numbers).clamp(min=0)
        counts = self.children.step.allowed_on_device[:, None] > self.depth
        return Level(tokens, level.parents, level.numbers, self.depth, counts, level.tree)

    def tree(self) -> tuple[Drafts, None]:
        parents = torch.cat([level.numbers[level.children // level.width] for level in self.shape])
        if not self.logits:
            return Drafts(self.tokens, parents), None
        rows, fed = torch.cat([level.numbers for level in self.shape]) + 1, torch.cat(self.logits, 1)
        # The rows of nodes without children are not read.
        logits = fed.new_empty(len(fed), len(parents) + 1, fed.shape[2]).index_copy_(1, rows, fed)
        return Drafts(self.tokens, parents, logits, d2t=self.children.d2t), None


class _Children:
    """Draws children in one step, of several nodes of each sequence in one call."""

    def __init__(self, batch: BatchState, step: Step, d2t: torch.Tensor | None):
        self.batch, self.step, self.d2t = batch, step, d2t
        self._settings: dict[int, dict[str, Any]] = {}  # by how many nodes a sequence has
        self.statuses: list[torch.Tensor] = []  # [B] each: the gravest of the nodes of a level

    def _of_nodes(self, count: int) -> dict[str, Any]:
        """Returns the settings of ``count`` nodes of each sequence."""
        step = self.step
        if count not in self._settings:
            seed, position = (part.repeat_interleave(count, 0) for part in (step.seed, step.position))
            self._settings[count] = {"params": step.sampling.repeated(count), "seed": seed, "position": position}
        return self._settings[count] | {"d2t": self.d2t, "backend": self.batch.backend}

    def draw(
        self, logits: torch.Tensor, width: int, paths: torch.Tensor, offset: torch.Tensor | None = None
    ) -> DraftChildren:
        """Returns children of nodes with these ``logits`` [B, m, columns], each [B m, width].

        Args:
            paths: [B, m, depth] int64, their ancestors' tokens and their own, for penalties.
            offset: [m] int64, their rows in verification; None: children are the most likely tokens.
        """
        drawn = draft_children(
            logits.flatten(0, 1),
            width,
            offset=0 if offset is None else offset.repeat(len(logits)),
            drafts=paths.flatten(0, 1),
            sampled=offset is not None,
            **self._of_nodes(logits.shape[1]),
        )
        self._note(drawn.status, paths)
        return drawn

    def draw_coupled(self, logits: torch.Tensor, width: int, paths: torch.Tensor) -> torch.Tensor:
        """Returns the tokens of children [B m, width] int64 that arrive first in the race of rule ``coupled``."""
        settings = self._of_nodes(logits.shape[1]) | {"offset": paths.shape[2], "drafts": paths.flatten(0, 1)}
        tokens, status = first_arrivals(logits.flatten(0, 1), width, **settings)
        self._note(status, paths)
        return tokens

    def _note(self, status: torch.Tensor, paths: torch.Tensor) -> None:
        self.batch.timer.lap("kernels")
        counts = self.step.allowed_on_device > paths.shape[2]
        self.statuses.append(status.view(paths.shape[:2]).amax(1) * counts)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Returns where the largest ``count`` of each row of ``values`` [B, n] are, ascending; the first of a tie."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values


def _rows(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns the rows ``index`` [B, m] of each sequence's ``values`` [B, n, d]."""
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[2]))
