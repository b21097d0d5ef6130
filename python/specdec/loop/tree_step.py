"""A step of speculative decoding with a tree of drafts: one target forward scores several continuations of each text.

It is the step of step.py with a tree in the place of the chain: every node sees the text and its own ancestors
(SpecInfer, arXiv 2305.09781, section 4), and ``verify_tree`` accepts a path from the root. It walks down trees that are
not sampled, so that with rule ``coupled`` the text is, token for token, that of plain sampling with the same random
numbers. The keys of the accepted nodes are moved to where a plain step stores them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec_kernels import TreeStep, draft_step, verify_tree

from ..drafters.protocol import DraftTree, Step
from ..models.tree import Tree
from .device_rows import StepPlan
from .step import SpeculativeLoop
from .step_report import EmittedLogProbs, StepResult, on_path, pack_tree
from .token_log_probs import score
from .typical import Typical, typical_step


@dataclass
class TreeLoop(SpeculativeLoop):
    """Runs the steps of a batch whose drafter proposes trees. Steps without drafts are those of chains.

    Attributes:
        typical: accepts by this lossy rule; None: exactly.
    """

    typical: Typical | None = None

    def step(self, plan: StepPlan) -> StepResult:
        if plan.num_drafts == 0 or self.session is None or not self.session.alive:
            return super().step(plan)
        g, lap = self.generation, self.generation.stopwatch.lap
        step = self.rows.place(plan)
        drafts = self.draft_tree(step)
        if plan.steady:
            drafts = drafts.widened(g.nodes)
        lap("loop")
        tree, parents = Tree.of(drafts.parents), drafts.parents.expand(drafts.tokens.shape)
        none = (drafts.tokens < 0) | (drafts.tokens >= self.target.vocab_size)
        below = (tree.ancestors[:, 1:, 1:] & none[:, None]).any(-1)  # none, or below one
        counts = ~below & (tree.depths[:, 1:] <= step.allowed_on_device[:, None])
        logits = self.score_tree(step, tree, drafts.tokens, counts)
        lap("target_forwards")
        processed = logits
        if g.processors:
            processed = g.processors.of_tree(logits, step.processed, counts, drafts.tokens, parents)
        depth = min(step.num_drafts, counts.shape[1])
        settings: dict = {"params": g.params, "seed": g.seed, "position": step.position, "backend": g.backend}
        if self.typical is not None:
            nodes = (drafts.tokens, parents, tree, counts)
            out = typical_step(self.typical, processed, *nodes, depth=depth, **settings)
        else:
            out = verify_tree(
                processed,
                drafts.tokens.where(counts, -1),
                parents,
                drafts.logits,
                d2t=drafts.d2t,
                table=step.table,
                depth=depth,
                rule="walk" if drafts.logits is None else g.rule,
                **settings,
            )
        g.target_cache.compact(out.path)
        self.session.compact(out.path)
        log_probs = self.log_probs(plan, step, logits, processed, out) if plan.log_probs else None
        emitted = self.rows.advance(out)
        report, reals = pack_tree(out, drafts, tree, counts, step.allowed_on_device, emitted, log_probs)
        lap("kernels")
        return StepResult(drafts, logits, out, report, reals)

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

    def log_probs(
        self, plan: StepPlan, step: Step, logits: torch.Tensor, processed: torch.Tensor, out: TreeStep
    ) -> EmittedLogProbs:
        """Returns the log-probabilities of the emitted tokens, by the rows of the accepted path, since ``verify_tree``
        does not.

        Args:
            logits, processed: [B, n + 1, V], before and after processors.
        """
        rows, tokens = on_path(logits, out.path), out.tokens.clamp(min=0)
        raw = score(rows.flatten(0, 1), tokens.flatten(), 0)[:, 0].view(tokens.shape)
        scored = self.score_tokens(plan, rows, tokens) if plan.num_scored else None
        return EmittedLogProbs(self.sampled_log_probs(step, on_path(processed, out.path), tokens), raw, scored)

    def sampled_log_probs(self, step: Step, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Returns [B, D + 1] float32, log p of ``tokens`` [B, D + 1] after penalties, temperature and filters.

        log p is the token's logit after penalties and temperature less the row's log-sum-exp after filters, and the
        former is the log-sum-exp of the row in which all other tokens are banned. Of a greedy sequence both are the
        largest logit, so that log p is 0. What is drawn here is not used.

        Args:
            rows: [B, D + 1, V], that decided the tokens.
        """
        g, index = self.generation, tokens[:, :, None]
        alone, found = torch.full_like(rows, -torch.inf).scatter(2, index, rows.gather(2, index)), []
        for depth in range(tokens.shape[1]):
            whole, own = (
                draft_step(
                    each[:, depth],
                    g.params,
                    seed=g.seed,
                    position=step.position,
                    offset=depth,
                    table=step.table,
                    drafts=tokens[:, :depth],
                    backend=g.backend,
                )
                for each in (rows, alone)
            )
            found.append(own.lse - whole.lse)
        return torch.stack(found, 1)
