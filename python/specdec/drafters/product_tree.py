"""Trees of drafters that know the distributions of all next tokens at once, each without the drafts before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from specdec_kernels import DraftChildren, draft_children

from .drawing import first_arrivals, keeps_q
from .protocol import BatchState, Drafts, Step
from .tree_paths import BestPaths, Path, StaticPaths, likely_paths

ACCEPTANCE = 0.6  # with which the shape of sampled trees is planned


class ProductTrees:
    """Makes the trees of a batch. For greedy text they are made of the most likely tokens. Otherwise their shape is the
    same in every step, and the children of a node are drawn; under rule ``coupled`` by the race that the target runs
    there as well, so that they often are the target's own.

    Args:
        depth: the most tokens of a path.
        paths: of the same tree in every step, as ranks; if children are drawn, by order. None: deterministic trees hold
            the chain of the most likely tokens, of up to half of their nodes, and else the most probable paths; drawn
            ones have the paths that would be most probable if 60 % of the tokens of each rank were accepted.
    """

    def __init__(self, batch: BatchState, depth: int, device: torch.device, paths: Sequence[Path] | None = None):
        self.batch, nodes = batch, batch.nodes
        self.static = StaticPaths(paths or likely_paths(nodes, depth, ACCEPTANCE), device)
        self.best = BestPaths(nodes, device, nodes // 2) if paths is None else self.static
        self._statuses: list[torch.Tensor] = []  # of the step's draws

    def tree(self, marginals: Iterable[torch.Tensor], step: Step, d2t: torch.Tensor | None = None) -> Drafts:
        """Returns a step's tree, drafted by one call of a model.

        Args:
            marginals: logits [B, columns] of one depth after the other, at most K.
            d2t: [columns] int64, ascending: the target's ids of the columns; None: they are the same ids.
        """
        batch, logits, self._statuses = self.batch, [], []
        for each in marginals:
            logits.append(each)
            batch.timer.lap("draft_forwards")
        tree = self._drawn(logits, step, d2t) if keeps_q(batch, step) else self._walked(logits, step, d2t)
        batch.timer.lap("kernels")
        return tree.with_faults(self._statuses)._replace(forwards=1)

    def _walked(self, marginals: list[torch.Tensor], step: Step, d2t: torch.Tensor | None) -> Drafts:
        """All nodes of a depth have the same children. Penalties do not count the tokens of a path here, since each
        node would need a distribution of its own. Texts do not depend on that."""
        paths = self.best if step.greedy else self.static
        of_depths: list[tuple[torch.Tensor, torch.Tensor]] = []
        for depth, logits in enumerate(marginals):
            if step.greedy:
                greedy = {"position": step.position + depth, "offset": 0, "sampled": False}
                children = self._children(logits, paths.width, step, d2t, **greedy)
                tokens, log_q = children.tokens, children.log_q
            else:
                tokens, status = first_arrivals(
                    logits,
                    min(paths.width, logits.shape[1]),
                    params=step.sampling,
                    seed=step.seed,
                    position=step.position + depth,
                    offset=0,
                    d2t=d2t,
                    backend=self.batch.backend,
                )
                self._statuses.append(status)
                tokens = torch.nn.functional.pad(tokens, (0, paths.width - tokens.shape[1]), value=-1)
                log_q = torch.zeros_like(tokens, dtype=torch.float32).where(tokens >= 0, -torch.inf)
            of_depths.append((tokens, log_q.where(step.allowed_on_device[:, None] > depth, -torch.inf)))
        return Drafts(*paths.choose(*(torch.stack(parts, 1) for parts in zip(*of_depths, strict=True))))

    def _drawn(self, marginals: list[torch.Tensor], step: Step, d2t: torch.Tensor | None) -> Drafts:
        """Verification needs the distribution of every row. They are copies of the marginals, [B, N + 1, columns], as
        large as what the target's forward returns."""
        nodes = [torch.full_like(step.position, -1)] * len(self.static.parents)
        for row, (path, children) in enumerate(self.static.rows):
            if not children or len(path) >= len(marginals):
                continue
            drafts = torch.stack([nodes[i] for i in path], 1) if path else step.last_two[:, :0]
            settings = {"position": step.position, "offset": row, "drafts": drafts}
            drawn = self._children(marginals[len(path)], len(children), step, d2t, **settings)
            for node, token in zip(children, drawn.tokens.unbind(1), strict=True):
                nodes[node] = token
        depths = [min(len(path), len(marginals) - 1) for path, _ in self.static.rows]
        logits = torch.stack([marginals[depth] for depth in depths], 1)
        return Drafts(torch.stack(nodes, 1), self.static.parents, logits, d2t=d2t)

    def _children(
        self, logits: torch.Tensor, width: int, step: Step, d2t: torch.Tensor | None, **settings: Any
    ) -> DraftChildren:
        drawn = draft_children(
            logits, width, step.sampling, seed=step.seed, d2t=d2t, backend=self.batch.backend, **settings
        )
        self._statuses.append(drawn.status)
        return drawn
