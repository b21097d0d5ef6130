"""One step of speculative decoding with a tree of drafts, the device's part of it.

The drafter proposes several continuations of each text, which share their beginnings, and the target scores all of them
in one forward: every node sees the text and its own ancestors (SpecInfer, arXiv 2305.09781, section 4). One operation
then walks from the root down. It draws a token from the target at each node, goes on to the child that holds it, and
ends where there is none; the last token that it drew is emitted as well. So the text is, token for token, that of plain
sampling with the same random numbers. The keys of the accepted nodes are moved to where a plain step stores them.
"""

from __future__ import annotations

import torch

from specdec_kernels import verify_tree

from ..drafters.protocol import DraftTree, Step
from ..models.tree import Tree
from .device_rows import StepPlan
from .step import SpeculativeLoop
from .step_report import StepResult, pack_tree


class TreeLoop(SpeculativeLoop):
    """Runs the steps of a batch whose drafter proposes trees. Steps without drafts are those of chains."""

    def step(self, plan: StepPlan) -> StepResult:
        if plan.num_drafts == 0 or self.session is None or not self.session.alive:
            return super().step(plan)
        g, lap = self.generation, self.generation.stopwatch.lap
        step = self.rows.place(plan)
        drafts = self.draft_tree(step)
        if plan.steady:
            drafts = drafts.widened(g.nodes)
        lap("loop")
        tree, parents = Tree.of(drafts.parents), torch.atleast_2d(drafts.parents)
        none = (drafts.tokens < 0) | (drafts.tokens >= self.target.vocab_size)
        below = (tree.ancestors[:, 1:, 1:] & none[:, None]).any(-1)  # none, or below one
        counts = ~below & (tree.depths[:, 1:] <= step.allowed_on_device[:, None])
        logits = self.score_tree(step, tree, drafts.tokens, counts)
        lap("target_forwards")
        out = verify_tree(
            logits,
            drafts.tokens.where(counts, -1),
            drafts.parents,
            drafts.logits,
            params=g.params,
            seed=g.seed,
            position=step.position,
            d2t=drafts.d2t,
            table=step.table,
            depth=min(step.num_drafts, counts.shape[1]),
            rule="walk" if drafts.logits is None else g.rule,
            backend=g.backend,
        )
        g.target_cache.compact(out.path)
        self.session.compact(out.path)
        emitted = self.rows.advance(out)
        report = pack_tree(out, tree, parents, counts, emitted)
        lap("kernels")
        return StepResult(drafts, logits, out, report, 0)

    def draft_tree(self, step: Step) -> DraftTree:
        """Drafts up to N nodes a row, of paths of up to K."""
        assert self.session is not None
        none = step.last_two[:, :0]
        return self.session.draft_tree(step) or DraftTree(none, none)

    def score_tree(self, step: Step, tree: Tree, nodes: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Feeds the target the last known token and the ``nodes`` [B, n]. Returns logits [B, n + 1, V], where row 0
        predicts the token after the text and row i + 1 the one after node i.

        Args:
            counts: [B, n] bool, the nodes that count.
        """
        cache = self.generation.target_cache
        cache.lengths = step.lengths
        live = self.rows.room[:, None] > 0
        places = tree.places(step.lengths, torch.cat((live, counts), 1), cache.trash)
        layout = self.target.layout(*places, step.visible, tree)
        tokens = torch.cat((step.last_two[:, 1:], nodes.clamp(0, self.target.vocab_size - 1)), 1)
        return self.target(tokens, cache, layout)
