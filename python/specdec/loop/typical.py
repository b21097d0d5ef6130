"""Typical acceptance of trees (Medusa, arXiv 2401.10774, section 2.3.1).

**Lossy**: a draft is accepted where the target finds it likely enough, whether or not it would have been drawn. So
sampled texts do not have the target's distribution, and depend on the drafts. Nothing chooses this rule by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from specdec_kernels import Rule, SamplingParams, Status, TreeStep, draft_step

from ..checks import refuse
from ..models.tree import Tree

TYPICAL = "typical"  # its name, beside those of ``Rule``, which are exact
_DRAFT_TO_TARGET = int(Status.DRAFT_NAN) // int(Status.TARGET_NAN)  # the same faults, of a row of the other kind


@dataclass(frozen=True)
class Typical:
    """**Lossy.** Accepts a node x below a row if p(x) > min(epsilon, delta exp(-H(p))), where p is the target's
    distribution after temperature and filters and H its entropy in nats; at temperature 0, where p is one-hot, if it is
    the target's most likely token. The longest path of such nodes is emitted, of several the most likely one, and then
    one token that is drawn from p.

    Args:
        epsilon: from 0 to below 1; smaller accepts more.
        delta: > 0, by default about sqrt(epsilon), as in the paper.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < 1:
            refuse("epsilon", self.epsilon, "a number from 0 to below 1")
        if not 0 < self.delta < math.inf:
            refuse("delta", self.delta, "a finite number > 0")

    def threshold(self, p: torch.Tensor) -> torch.Tensor:
        """Returns [...], which probabilities [..., V] have to exceed."""
        return (self.delta * (-torch.special.entr(p).sum(-1)).exp()).clamp(max=self.epsilon)


def typical_step(
    typical: Typical,
    logits: torch.Tensor,
    nodes: torch.Tensor,
    parents: torch.Tensor,
    tree: Tree,
    counts: torch.Tensor,
    *,
    params: SamplingParams,
    seed: torch.Tensor,
    position: torch.Tensor,
    depth: int,
    backend: str,
) -> TreeStep:
    """Accepts a path of a tree, as ``verify_tree`` does, but by a lossy rule. Nothing waits for the device.

    Args:
        logits: [B, n + 1, V], row 0 after the text, row 1 + i after node i.
        nodes, parents: [B, n] int64.
        counts: [B, n] bool, the nodes that count, down to ``depth``; with a node its ancestors count.
        params: packed, without penalties.
        seed, position: [B] int64. The last token is drawn as by rule ``coupled``.
    """
    batch, rows, vocabulary = logits.shape
    depths = tree.depths.expand(batch, -1)
    temperature, *filters = (getattr(params, name) for name in ("temperature", *SamplingParams.FILTERS))
    packed = None if filters[0] is None else torch.stack(filters, 1).repeat_interleave(rows, 0)
    drawn = draft_step(
        logits.flatten(0, 1),
        SamplingParams.packed(temperature.repeat_interleave(rows), packed, None),
        seed=seed.repeat_interleave(rows),
        position=(position[:, None] + depths).flatten(),
        offset=0,
        rule=Rule.COUPLED,
        backend=backend,
    )
    token, cutoff, lse, status = (t.view(batch, rows) for t in (drawn.tokens, drawn.cutoff, drawn.lse, drawn.status))
    greedy = temperature[:, None, None] == 0
    log_p = logits.float() / temperature[:, None, None].where(~greedy, 1.0) - lse[:, :, None]
    one_hot = torch.arange(vocabulary, device=logits.device) == token[:, :, None]
    log_p = log_p.masked_fill(torch.where(greedy, ~one_hot, logits < cutoff[:, :, None]), -torch.inf)
    threshold = typical.threshold(log_p.exp())

    row = parents + 1
    own = log_p.flatten(1).gather(1, row * vocabulary + nodes.clamp(0, vocabulary - 1))
    likely = counts & (own.exp() > threshold.gather(1, row))
    above = tree.ancestors[:, 1:, 1:].expand(batch, -1, -1)
    accepted = ~(above & ~likely[:, None]).any(-1)
    of_path = (above * own.masked_fill(~likely, 0.0)[:, None]).sum(-1)
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
