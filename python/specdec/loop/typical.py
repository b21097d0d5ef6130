"""Typical acceptance of trees (Medusa, arXiv 2401.10774, section 2.3.1).

**Lossy**: a draft is accepted where the target finds it likely enough, whether or not it would have been drawn. So
sampled texts do not have the target's distribution, and depend on the drafts. It is used only where it is passed as
``rule=Typical()``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from specdec_kernels import Rule, SamplingParams, SpeculativeStep, Status, TreeStep, draft_step

from ..checks import refuse
from ..drafters.protocol import Drafts, Step
from ..models.cache.tree import Tree
from .sequence import SequenceState
from .step import AcceptRule

_DRAFT_TO_TARGET = int(Status.DRAFT_NAN) // int(Status.TARGET_NAN)  # the same faults, of a row of the other kind


@dataclass(frozen=True)
class Typical(AcceptRule):
    """**Lossy.** Accepts a node x below a row if p(x) > min(epsilon, delta exp(-H(p))), where p is the target's
    distribution after temperature and filters and H its entropy in nats; at temperature 0, where p is one-hot, if it is
    the target's most likely token. The longest path of such nodes is emitted, of several the most likely one, and then
    one token that is drawn from p, as rule ``coupled`` draws it.

    Args:
        epsilon: from 0 to below 1; smaller accepts more.
        delta: > 0, by default about sqrt(epsilon), as in the paper.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """

    rule: Rule = field(default=Rule.COUPLED, init=False)
    epsilon: float = 0.09
    delta: float = 0.3

    trees_only = True
    exact = False

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < 1:
            refuse("epsilon", self.epsilon, "a number from 0 to below 1")
        if not 0 < self.delta < math.inf:
            refuse("delta", self.delta, "a finite number > 0")

    def check(self, sequence: SequenceState) -> None:
        penalised = any(sequence.params[name] != SamplingParams.neutral(name) for name in SamplingParams.PENALTIES)
        if penalised or sequence.bias or sequence.request.min_new_tokens:
            refuse("rule", "Typical with penalties, bias, bans or min_new_tokens", "none of these, or an exact rule")

    def threshold(self, p: torch.Tensor) -> torch.Tensor:
        """Returns [...], which probabilities [..., V] have to exceed."""
        return (self.delta * (-torch.special.entr(p).sum(-1)).exp()).clamp(max=self.epsilon)

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
        if tree is None or drafts.parents is None or counts is None:
            return super().verify(step, logits, drafts, tree, counts, backend, masks)
        nodes, parents = drafts.tokens, drafts.parents.expand(counts.shape)
        depth = min(step.num_drafts, counts.shape[1])
        batch, rows, vocabulary = logits.shape
        depths, of_rows = tree.depths.expand(batch, -1), step.sampling.repeated(rows)
        drawn = draft_step(
            logits.flatten(0, 1),
            of_rows,
            seed=step.seed.repeat_interleave(rows),
            position=(step.position[:, None] + depths).flatten(),
            offset=0,
            rule=Rule.COUPLED,
            backend=backend,
        )
        token, cutoff, lse, status = (
            t.view(batch, rows) for t in (drawn.tokens, drawn.cutoff, drawn.lse, drawn.status)
        )
        temperature = step.sampling.temperature[:, None, None]
        greedy = temperature == 0
        log_p = logits.float() / temperature.where(~greedy, 1.0) - lse[:, :, None]
        one_hot = torch.arange(vocabulary, device=logits.device) == token[:, :, None]
        log_p = log_p.masked_fill(torch.where(greedy, ~one_hot, logits < cutoff[:, :, None]), -torch.inf)
        threshold = self.threshold(log_p.exp())

        row = parents + 1
        of_nodes = log_p.flatten(1).gather(1, row * vocabulary + nodes.clamp(0, vocabulary - 1))
        likely = counts & (of_nodes.exp() > threshold.gather(1, row))
        above = tree.ancestors[:, 1:, 1:].expand(batch, -1, -1)
        accepted = ~(above & ~likely[:, None]).any(-1)
        of_path = (above * of_nodes.masked_fill(~likely, 0.0)[:, None]).sum(-1)
        # The depth, and of one depth the probability of the path.
        rank = torch.where(accepted, depths[:, 1:] + 0.5 * of_path.exp(), -1.0)
        best = torch.nn.functional.pad(rank, (1, 0)).argmax(1, keepdim=True)

        on_path = tree.ancestors.expand(batch, -1, -1).gather(1, best[:, :, None].expand(-1, -1, rows))[:, 0, 1:]
        place = torch.where(on_path, depths[:, 1:] - 1, depth)  # no path has so many nodes
        path = nodes.new_full((batch, depth + 1), -1)
        index = torch.arange(rows - 1, device=nodes.device)
        path, tokens = (path.scatter(1, place, torch.where(on_path, t, -1)) for t in (index, nodes))
        count, last = depths.gather(1, best), token.gather(1, best)
        emitted = count + (last >= 0)
        status = status.gather(1, best) // _DRAFT_TO_TARGET
        integers = (t[:, 0].to(torch.int32) for t in (count, emitted, status))
        return TreeStep(path, tokens.scatter(1, count, last), *integers)
