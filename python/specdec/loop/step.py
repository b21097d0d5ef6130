"""One step of speculative decoding, for chains and trees, the whole of it on the device.

The words, as everywhere in this package:

- **p** is the target's distribution, **q** the draft's, both after processors, penalties, temperature and filters.
- A **draft** is a proposed token. Drafts are a **chain**, in which each follows the one before, or a **tree**, whose
  **nodes** share their beginnings: a chain is a tree with one path, and has cheaper kernels.
- The target reads the last known token and all drafts in one forward. **Row** 0 of its logits decides the token after
  the known text, row 1 + i the one after draft i.
- A draft is **accepted** if it passes its test, **tested** if it was accepted or is the one at which acceptance ended.
- After a rejection one **recovered** token is drawn from the residual max(0, p - q), otherwise one **bonus** token from
  p. Accepted drafts and this token are **emitted**. So the text has the distribution of plain sampling from the target
  (Leviathan et al., arXiv 2211.17192, Algorithm 1; Chen et al., arXiv 2302.01318, Algorithm 2; for trees SpecInfer,
  arXiv 2305.09781, section 4).
- A row is **advanced** by what it emitted: the keys of rejected drafts stay where they are and are written over.

A step continues from the state in which the previous step left the rows. Nothing in it waits for the host, so it can be
replayed as a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from specdec_kernels import Rule, SpeculativeStep, TreeRule, TreeStep, speculative_step, verify_tree

from ..drafters.guard import GuardedSession
from ..drafters.protocol import BatchState, Drafts, Step
from ..models.cache.tree import Tree
from .log_probs import log_probs_of_path, on_path, ranked
from .report import StepResult, pack
from .rows import Rows

if TYPE_CHECKING:
    from ..models.forward.cached_model import CachedModel
    from .sequence import SequenceState


@dataclass(frozen=True)
class AcceptRule:
    """Accepts drafts exactly, by a rule of the kernels. A subclass may accept them in another way.

    Attributes:
        rule: with which drafts are drawn, and chains are verified.
        exact: whether the emitted text has the target's distribution whatever is drafted.
        trees_only: whether it is for trees alone.
    """

    rule: Rule = Rule.TOKEN

    exact: ClassVar[bool] = True
    trees_only: ClassVar[bool] = False

    def check(self, sequence: SequenceState) -> None:
        """Raises ValueError for a sequence with settings that the rule does not know."""

    def verify(
        self,
        step: Step,
        logits: torch.Tensor,
        drafts: Drafts,
        tree: Tree | None,
        counts: torch.Tensor | None,
        backend: str,
        masks: torch.Tensor | None = None,
    ) -> SpeculativeStep | TreeStep:
        """Returns what is accepted and emitted.

        Args:
            logits: [n, k + 1, V], the target's, after processors.
            tree: the shape of ``drafts``; None: they are chains.
            counts: [n, k] bool, the nodes of a tree that count; with a node its ancestors count.
            masks: [n, k + 1, W] int32, the tokens that grammars allow in each row of a chain; None: no row has any.
        """
        if tree is None and drafts.one_hot is not None and drafts.logits is not None:
            return self._verify_apart(step, logits, drafts, backend, masks)
        columns, allowed = drafts.tokens.shape[1], step.allowed_on_device
        if tree is None:
            counting = None  # all columns
            if columns:
                counting = allowed if columns >= step.num_drafts else allowed.clamp(max=columns)
            return speculative_step(
                logits,
                drafts.tokens,
                drafts.logits,
                params=step.sampling,
                seed=step.seed,
                position=step.position,
                num_drafts=counting,
                draft_stats=drafts.stats,
                d2t=drafts.d2t,
                rule=self.rule,
                allowed=masks,
                masked_drafts=0 if masks is None or drafts.logits is None else drafts.masked,
                log_probs=step.log_probs,
                backend=backend,
            )
        assert drafts.parents is not None and counts is not None
        walks = drafts.logits is None or self.rule == Rule.COUPLED  # which has no q
        return verify_tree(
            logits,
            drafts.tokens.where(counts, -1),
            drafts.parents,
            drafts.logits,
            params=step.sampling,
            seed=step.seed,
            position=step.position,
            d2t=drafts.d2t,
            depth=min(step.num_drafts, columns),
            rule=TreeRule.WALK if walks else self.rule,
            backend=backend,
        )

    def _verify_apart(
        self, step: Step, logits: torch.Tensor, drafts: Drafts, backend: str, masks: torch.Tensor | None
    ) -> SpeculativeStep:
        """The same of chains of which some have a one-hot q. Each kind is verified as if the rows of the other had no
        drafts. A row's result does not depend on others."""
        copied = torch.tensor(drafts.one_hot, device=logits.device)
        one_hot = drafts._replace(logits=None, stats=None, d2t=None, masked=0)
        parts = []
        for kind, others in ((drafts._replace(one_hot=None), copied), (one_hot, ~copied)):
            part = replace(step, allowed_on_device=step.allowed_on_device.masked_fill(others, 0))
            parts.append(self.verify(part, logits, kind, None, None, backend, masks))

        def joined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.where(copied if a.dim() == 1 else copied[:, None], b, a)

        return SpeculativeStep._make(None if a is None else joined(a, b) for a, b in zip(*parts, strict=True))


@dataclass
class StepRunner:
    """Runs the steps of a batch.

    Attributes:
        session: proposes drafts; None: plain decoding.
    """

    target: CachedModel
    session: GuardedSession | None
    state: BatchState
    rows: Rows
    rule: AcceptRule

    def run(self, step: Step) -> StepResult:
        """Drafts, verifies, and advances every row by its emitted tokens.

        Verification is where drafts are checked. Until then nothing of the rows has changed, so if it refuses them,
        their drafter is dropped, and the step runs again without it.
        """
        state, lap = self.state, self.state.timer.lap
        drafts = self.propose(step)
        lap("loop")
        tree = None if drafts.parents is None else Tree.of(drafts.parents)
        # Of chains, only processors need to know on the host which drafts count.
        counts = self.counts(step, drafts, tree) if tree is not None or state.processors else None
        # The host walks through the grammars while the target computes.
        sent = state.grammars.send(drafts.tokens) if state.grammars else None
        logits = self.target_forward(step, drafts, tree, counts)
        lap("target_forwards")
        processed = logits
        if state.processors and counts is not None:
            processed = state.processors(logits, step.seen, counts, drafts.tokens, drafts.parents)
        masks = None if sent is None else state.grammars.after(sent)
        try:
            out = self.rule.verify(step, processed, drafts, tree, counts, state.backend, masks)
        except ValueError as error:
            if drafts.tokens.shape[1] == 0 or self.session is None or not self.session.refused(error):
                raise
            return self.run(step)
        if isinstance(out, TreeStep):
            state.target_cache.compact(out.path)
            if self.session is not None:
                self.session.accepted(out.path)
        log_probs = self.log_probs(step, logits, processed, out) if step.log_probs else None
        emitted = self.rows.advance(out)
        report = pack(step, drafts, tree, counts, out, emitted)
        lap("kernels")
        return StepResult(drafts, logits, out, report, log_probs)

    def propose(self, step: Step) -> Drafts:
        """Returns the step's drafts, with the q that they were drawn from."""
        drafts = self.session.propose(step) if step.num_drafts and self.session is not None else None
        if drafts is None:
            drafts = Drafts.none(step)
            return drafts.widened(step.num_drafts) if step.fixed_shape else drafts
        return drafts

    def counts(self, step: Step, drafts: Drafts, tree: Tree | None) -> torch.Tensor:
        """Returns [n, k] bool, the drafts that count: a row may have so many of them, and an id outside the vocabulary
        ends a chain, and the branch of a tree."""
        tokens, allowed = drafts.tokens, step.allowed_on_device[:, None]
        none = (tokens < 0) | (tokens >= self.target.vocab_size)
        if tree is None:
            return (none.cumsum(1) == 0) & (self.rows.columns[: tokens.shape[1]] < allowed)
        below = (tree.ancestors[:, 1:, 1:] & none[:, None]).any(-1)
        return ~below & (tree.depths[:, 1:] <= allowed)

    def target_forward(
        self, step: Step, drafts: Drafts, tree: Tree | None, counts: torch.Tensor | None
    ) -> torch.Tensor:
        """Feeds the target the last known token and the drafts. Returns logits [n, k + 1, V]."""
        cache, columns = self.state.target_cache, slice(1, drafts.tokens.shape[1] + 2)
        cache.lengths = step.lengths
        positions, slots = step.positions[:, columns], step.slots[:, columns]
        if tree is not None and counts is not None:
            positions, slots = tree.places(step.lengths, torch.cat((step.live[:, None], counts), 1), cache.trash)
        tokens = step.last_two[:, 1:]
        if drafts.tokens.shape[1]:  # an id outside the vocabulary ends them, but the target must be fed some token
            tokens = torch.cat((tokens, drafts.tokens.clamp(0, self.target.vocab_size - 1)), 1)
        return self.target(tokens, cache, self.target.layout(positions, slots, step.visible, tree))

    def log_probs(
        self, step: Step, logits: torch.Tensor, processed: torch.Tensor, out: SpeculativeStep | TreeStep
    ) -> torch.Tensor:
        """Returns the log-probabilities of the emitted tokens, as :class:`~specdec.loop.report.RowReport` has them:
        the kernel's for chains, and those by the rows of the accepted path for trees."""
        if isinstance(out, TreeStep):
            logits = on_path(logits, out.path)
            drawn, raw = log_probs_of_path(step, logits, on_path(processed, out.path), out.tokens, self.state.backend)
        else:
            assert out.log_probs is not None and out.raw_log_probs is not None
            drawn, raw = out.log_probs, out.raw_log_probs
        values = torch.stack((drawn, raw), -1).double()
        if step.num_ranked == 0:
            return values
        rows = self.rows.ranked[: step.num_ranked]
        scores = ranked(logits, out.tokens, rows, step.top)
        # ``raw`` is of the logits that the kernel was given, which are not the model's own if processors changed them.
        values[:, :, 1].index_copy_(0, rows, scores[:, :, 0])
        return torch.cat((values, values.new_zeros(*raw.shape, scores.shape[2]).index_copy_(0, rows, scores)), -1)
