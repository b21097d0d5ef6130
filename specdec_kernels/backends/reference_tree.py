"""The oracle of the tree operations, in float64 and written to be read. docs/numerics.md states the same rules.

Random numbers and races are those of reference.py, and so are margins: a float32 kernel may decide otherwise only where
the margin is within rounding. Subtracting similar distributions, again and again for several siblings, magnifies that;
so a bound of each error is computed beside the number.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from ..ops import TREE_RULES, SamplingTensors, implement
from ..types import Status
from . import reference as chain
from .reference_distribution import DRAFT_STATUS, TARGET_STATUS, adjusted, distribution, row_status

# The relative error of p and q in float32, at most, and the margin of a number that is as far away as its error.
_ERROR, _NEAR = 5e-6, 1e-4


def arrivals(weights, seed, position, offset, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``count`` to arrive in a race of the columns of ``weights`` [B, V]: draws without replacement.

    Returns ([B, count] columns, -1 where no weights are left; [B] margin).
    """
    index = torch.arange(weights.shape[1], device=weights.device).expand(weights.shape)
    u = chain.uniform(chain.philox(seed, index, position, offset, chain.DRAFT_TOKEN))
    score, column = (weights / -torch.log1p(-u)).sort(dim=-1, descending=True, stable=True)
    score = torch.nn.functional.pad(score, (0, max(count + 1 - weights.shape[1], 0)))
    column = torch.nn.functional.pad(column, (0, max(count - weights.shape[1], 0)))[:, :count]
    between = torch.where(score[:, :count] > 0, 1 - score[:, 1 : count + 1] / score[:, :count], 1.0)
    arrived = score[:, :count] > 0
    # In float32 a weight below 2^-125 of the largest one is 0.
    faint = arrived & (weights.gather(1, column) < 2.0**-120 * weights.amax(-1, keepdim=True))
    return torch.where(arrived, column, -1), torch.where(faint.any(-1), 0.0, between.amin(-1))


def draft_children_with_margin(logits, sampling, drafts, d2t, seed, position, offset, width, sampled):
    """(the outputs of ``draft_children``, [B] margins)."""
    sampling = SamplingTensors(*sampling)
    drafts = torch.empty((len(seed), 0), dtype=torch.int64, device=seed.device) if drafts is None else drafts
    ids = torch.arange(logits.shape[1], device=logits.device) if d2t is None else d2t
    x = adjusted(logits, sampling, position, drafts, d2t)
    status = row_status(x, sampling.temperature, DRAFT_STATUS)
    bad = status != 0
    x = torch.where(bad[:, None], 0.0, x)
    if not sampled:  # at temperature 0, children are those of temperature 1 without filters
        greedy = sampling.temperature == 0
        off = torch.tensor([0.0, 1.0, 0.0], device=x.device)
        filters = None if sampling.filters is None else torch.where(greedy[:, None], off, sampling.filters)
        sampling = sampling._replace(temperature=torch.where(greedy, 1.0, sampling.temperature), filters=filters)
    q = distribution(x, sampling)
    if sampled:
        column, margin = arrivals(q.probability, seed, position, offset, width)
        margin = torch.where(sampling.temperature == 0, 1.0, margin)
    else:
        order = torch.where(q.log_probability > -torch.inf, x.double(), -torch.inf)
        falling, column = order.sort(dim=-1, descending=True, stable=True)
        column = torch.where(falling > -torch.inf, column, -1)[:, :width]
        column = torch.nn.functional.pad(column, (0, width - column.shape[1]), value=-1)
        margin = torch.ones_like(q.margin)
    nothing = (column < 0) | bad[:, None]
    column = column.clamp(min=0)
    outputs = (
        torch.where(nothing, -1, ids[column]),
        torch.where(nothing, -torch.inf, q.log_probability.gather(1, column)).to(q.lse.dtype),
        torch.where(bad, -torch.inf, q.cutoff),
        torch.where(bad, torch.nan, q.lse),
        status,
    )
    return outputs, torch.where(bad, 1.0, torch.minimum(margin, q.margin))


class _Tree:
    """One call of ``verify_tree`` for sequences whose tree is the same. ``here``, ``there`` and the like are [B] masks
    of the sequences that get to a place in the tree; what is computed for the others is ignored."""

    def __init__(self, tree: list[int], target, tokens, draft, d2t, num_nodes, sampling, seed, position, depth: int):
        self.target, self.drafts, self.draft, self.d2t = target, tokens, draft, d2t
        self.sampling, self.seed, self.position = sampling, seed, position
        self.batch, self.vocabulary = len(seed), target.shape[2]
        self.num_nodes = torch.full_like(seed, len(tree)) if num_nodes is None else num_nodes
        self.children: dict[int, list[int]] = defaultdict(list)  # of every row
        self.nodes: dict[int, list[int]] = {0: []}  # of the path to every row
        for node, parent in enumerate(tree):
            path = self.nodes.get(parent + 1) if -1 <= parent < node else None
            if path is not None and len(path) < depth:
                self.nodes[node + 1] = [*path, node]
                self.children[parent + 1].append(node)
        self.path = torch.full((self.batch, depth + 1), -1, dtype=torch.int64, device=seed.device)
        self.tokens = self.path.clone()
        self.num_accepted = torch.zeros_like(seed, dtype=torch.int32)
        self.status = torch.zeros_like(self.num_accepted)
        self.margin = torch.ones_like(seed, dtype=torch.float64)

    def run(self, rule: str):
        greedy, flags = self.sampling.temperature == 0, torch.zeros_like(self.status)
        self.joint = rule == "block"
        self.walk(0, greedy | (rule == "walk"), flags)
        if rule != "walk":
            self.visit(0, ~greedy, torch.ones_like(self.margin), torch.zeros_like(self.margin), flags)
        num_emitted = (self.tokens >= 0).sum(1).to(torch.int32)
        margin = torch.where(greedy, 1.0, self.margin)
        return (self.path, self.tokens, self.num_accepted, num_emitted, self.status), margin

    def walk(self, row: int, here, flags) -> None:
        """Rule ``walk``: draws a token from p with the noise of its position, and goes on to the child that holds
        it."""
        if not here.any():
            return
        fault, p = self.target_row(row)
        ids = torch.arange(self.vocabulary, device=here.device)
        drawn, margin = chain.coupled_race(p.probability, ids, self.seed, self.position + len(self.nodes[row]))
        self.closer(torch.minimum(margin, p.margin), here)
        flags, looking, left = flags | fault, here & (fault == 0), here
        for child in self.children[row]:
            there, flags = self.turn_of(child, looking, flags)
            found = there & (self.drafts[:, child] == drawn)
            self.walk(1 + child, found, flags)
            looking, left = looking & ~found, left & ~found
        self.finish(row, torch.where(fault == 0, drawn, -1), left, flags)

    def visit(self, row: int, here, h, h_error, flags):
        """Rules ``token`` (SpecInfer, arXiv 2305.09781, with Sequoia's draws without replacement, arXiv 2402.12374) and
        ``block`` (Traversal verification, arXiv 2505.12398): tests the children of a row, and then the row's own node.

        h: [B] the joint ratio of the path to this row: the probability with which ``block`` keeps it, if nothing below
        it is kept. ``token`` comes here after it has accepted the node, so that h = 1. Returns [B]: whether the path
        ends here or below.
        """
        if not here.any():
            return here
        fault, target = self.target_row(row)
        self.closer(target.margin, here)
        flags, kept = flags | fault, torch.zeros_like(here)
        p, p_error = target.probability, _ERROR * target.probability
        looking, q = here & (fault == 0), None
        for child in self.children[row]:
            there, flags = self.turn_of(child, looking, flags)
            if q is None and there.any():
                q_fault, q, q_margin = self.draft_row(row)
            if q is None:
                continue
            self.closer(q_margin, there)
            bad = there & (q_fault != 0)
            flags, looking, there = torch.where(bad, flags | q_fault, flags), looking & ~bad, there & ~bad

            x = self.drafts[:, child].clamp(0, self.vocabulary - 1)[:, None]
            p_x, q_x = (t.gather(1, x)[:, 0] for t in (p, q))
            flags = torch.where(there & (q_x == 0), flags | int(Status.DRAFT_ZERO_PROBABILITY), flags)
            ratio = torch.where(q_x > 0, h * p_x / q_x, 0.0)
            ratio_error = (h_error * p_x + h * p_error.gather(1, x)[:, 0]) / q_x + ratio * _ERROR
            if self.joint:
                certain = ratio - ratio_error >= 1
                error = torch.where(certain, 0.0, ratio_error)
                below = self.visit(1 + child, there & (ratio > 0), ratio.clamp(max=1.0), error, flags)
            else:
                passed = self.passes(child, ratio, ratio_error, there)
                below = self.visit(1 + child, passed, h, h_error, flags)

            # The child is rejected: p becomes what h p has beyond q, and q loses the child.
            residual = (h[:, None] * p - q).clamp(min=0.0)
            mass = residual.sum(-1)
            rejected = there & ~below
            if (forced := rejected & (mass == 0) & (h == 1) & (p_x > 0)).any():
                # Without a residual, p and q are equal up to rounding, and the child is accepted after all.
                below = below | self.visit(1 + child, forced, torch.ones_like(h), torch.zeros_like(h), flags)
            kept = kept | below
            looking = looking & ~below
            rejected = rejected & ~forced & ((mass > 0) | (h < 1))  # else the child is as if it were not there
            errors = h_error[:, None] * p + h[:, None] * p_error + _ERROR * q
            errors = torch.where(residual > 0, errors, 0.0)
            mass_error, whole = errors.sum(-1), torch.where(mass > 0, mass, 1.0)
            new_p_error = (errors + residual * (mass_error / whole)[:, None]) / whole[:, None]
            p = torch.where(rejected[:, None], residual / whole[:, None], p)
            p_error = torch.where(rejected[:, None], new_p_error, p_error)
            rest = q.scatter(1, x, 0.0)
            rest = rest / rest.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
            q = torch.where(rejected[:, None], rest, q)
            if self.joint:
                either = mass + (1 - h)
                new_h = torch.where(either > 0, mass / either, 1.0)
                new_error = ((1 - h) * mass_error + mass * h_error) / either.clamp(min=1e-30) ** 2
                h, h_error = torch.where(rejected, new_h, h), torch.where(rejected, new_error, h_error)

        here = here & ~kept
        if self.joint and row > 0:
            here = self.passes(row - 1, h, h_error, here)
        drawn, margin = chain.race(p, self.seed, self.position, row, (chain.RECOVER_BLOCK, chain.RECOVER_TOKEN))
        self.closer(margin, here & (fault == 0))
        self.finish(row, torch.where(fault == 0, drawn, -1), here, flags)
        return kept | here

    def target_row(self, row: int):
        """(status flags, p) of a row. A row that has no distribution gets a uniform p, which is not used."""
        x = adjusted(self.target[:, row], self.sampling, self.position, self.drafts[:, self.nodes[row]])
        fault = row_status(x, self.sampling.temperature, TARGET_STATUS)
        return fault, distribution(torch.where((fault != 0)[:, None], 0.0, x), self.sampling)

    def draft_row(self, row: int):
        """(status flags, q over the target's vocabulary, margin) of what the children of a row were drawn from."""
        x = adjusted(self.draft[:, row], self.sampling, self.position, self.drafts[:, self.nodes[row]], self.d2t)
        fault = row_status(x, self.sampling.temperature, DRAFT_STATUS)
        q = distribution(torch.where((fault != 0)[:, None], 0.0, x), self.sampling)
        ids = torch.arange(self.vocabulary, device=x.device) if self.d2t is None else self.d2t
        whole = torch.zeros((self.batch, self.vocabulary), dtype=torch.float64, device=x.device)
        whole[:, ids] = q.probability
        return fault, whole, q.margin

    def turn_of(self, child: int, looking, flags):
        """([B] whether the child is a candidate of a sequence that is ``looking``, [B] flags)."""
        there, x = looking & (child < self.num_nodes), self.drafts[:, child]
        in_range = (x >= 0) & (x < self.vocabulary)
        out = there & ~in_range & (x != -1)
        return there & in_range, torch.where(out, flags | int(Status.DRAFT_OUT_OF_RANGE), flags)

    def passes(self, node: int, probability, error, where):
        """[B] whether the random number of a node is below ``probability``, which is known up to ``error``."""
        bits = chain.philox(self.seed, torch.zeros_like(self.seed)[:, None], self.position, node, chain.ACCEPT)
        u = chain.uniform(bits).squeeze(-1)
        self.closer(_NEAR * (u - probability).abs() / error, where)
        return where & (u < probability)

    def finish(self, row: int, drawn, where, flags) -> None:
        """Ends the paths of the sequences ``where`` at a row: emits its tokens and ``drawn``, unless that is -1."""
        nodes = self.nodes[row]
        for d, node in enumerate(nodes):
            self.path[:, d] = torch.where(where, node, self.path[:, d])
            self.tokens[:, d] = torch.where(where, self.drafts[:, node], self.tokens[:, d])
        self.tokens[:, len(nodes)] = torch.where(where, drawn, self.tokens[:, len(nodes)])
        self.num_accepted = torch.where(where, len(nodes), self.num_accepted)
        self.status = torch.where(where, flags, self.status)

    def closer(self, margin, where) -> None:
        """Lowers the margins of the sequences ``where`` to ``margin``."""
        self.margin = torch.where(where, torch.minimum(self.margin, margin), self.margin)


def verify_tree_with_margin(target_logits, node_tokens, parents, draft_logits, d2t, num_nodes, sampling, seed, position,
                            rule, depth):  # fmt: skip
    """(the outputs of ``verify_tree``, [B] margins of the closest decision in each sequence)."""
    trees: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for b, tree in enumerate(parents.tolist()):
        trees[tuple(tree)].append(b)
    parts, order = [], []
    for tree, members in trees.items() or [((), [])]:
        index = torch.tensor(members, dtype=torch.int64, device=seed.device)

        def of(tensor, index=index):
            return None if tensor is None else tensor[index]

        part = _Tree(list(tree), of(target_logits), of(node_tokens), of(draft_logits), d2t, of(num_nodes),
                     SamplingTensors(*map(of, sampling)), of(seed), of(position), depth)  # fmt: skip
        outputs, margin = part.run(TREE_RULES[rule])
        parts.append((*outputs, margin))
        order.append(index)
    back = torch.cat(order).argsort()
    *outputs, margin = (torch.cat(column)[back] for column in zip(*parts, strict=True))
    return tuple(outputs), margin


def verify_tree(*arguments):
    return verify_tree_with_margin(*arguments)[0]


def draft_children(*arguments):
    return draft_children_with_margin(*arguments)[0]


implement("draft_children_reference", draft_children)
implement("verify_tree_reference", verify_tree)
