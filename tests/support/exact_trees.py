"""The exact distribution of a step of the reference with a tree, by enumerating its random choices, as exact.py does
for chains.

The reference uses random numbers only through ``arrivals``, ``race``, ``flat_race`` and ``_Tree.passes``. A
``TreeProbe`` replaces these by scripts. Every way in which children can arrive, the node at which the path can end, and
the token that can follow is one row of a batch, so the distribution is a finite sum over rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch

from specdec_kernels import draft_children, verify_tree
from specdec_kernels.backends import reference, reference_tree
from specdec_kernels.testing import Distribution, Model

from .exact import Context, Rows, Setting, arguments_of

AT_ONCE = 1000  # ways in which children can be drawn; each is some dozens of rows of a batch


def normalised(weights: torch.Tensor) -> torch.Tensor:
    mass = weights.sum(-1, keepdim=True)
    return torch.where(mass > 0, weights / mass, 0.0)


class TreeProbe:
    """Scripts the reference's random choices, and records their probabilities."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(reference_tree, "arrivals", self.arrivals)
        monkeypatch.setattr(reference, "race", self.race)
        monkeypatch.setattr(reference, "flat_race", self.flat_race)
        monkeypatch.setattr(reference_tree._Tree, "passes", lambda tree, *test: self.passes(*test))
        target_row, finish = reference_tree._Tree.target_row, reference_tree._Tree.finish

        def at_row(tree, row):
            self.row = row
            return target_row(tree, row)

        def finishing(tree, row, drawn, where, flags):
            self.drawn = torch.where(where, self.last, self.drawn)
            finish(tree, row, drawn, where, flags)

        monkeypatch.setattr(reference_tree._Tree, "target_row", at_row)
        monkeypatch.setattr(reference_tree._Tree, "finish", finishing)

    def arrivals(self, weights, seed, position, offset, count):
        """Columns arrive as scripted in ``order`` [B, <= count], as long as there are weights left."""
        left, self.probability = normalised(weights), torch.ones(len(weights), dtype=torch.float64)
        columns = []
        for column in self.order.unbind(1):
            exhausted = left.sum(-1) == 0
            probability = left.gather(1, column[:, None])[:, 0]
            # What is scripted beyond the last arrival must count once in all.
            unused = weights.shape[1] - len(columns)
            self.probability *= torch.where(exhausted, 1 / unused, probability)
            columns.append(torch.where(exhausted, -1, column))
            left = normalised(left.scatter(1, column[:, None], 0.0))
        drawn = torch.nn.functional.pad(torch.stack(columns, 1), (0, count - len(columns)), value=-1)
        return drawn, torch.ones(len(weights), dtype=torch.float64)

    def script(self, winner: torch.Tensor, passing: torch.Tensor | None = None, position=None) -> None:
        """winner: [B], or for rule ``walk`` [B, D + 1]; passing: [B, N]; position: [B] of the step, for rule
        ``walk``."""
        self.winner, self.passing, self.start = winner, passing, position
        self.weights: dict[int, torch.Tensor] = {}  # of rule walk's race at every row
        self.probability = torch.ones(len(winner), dtype=torch.float64)
        self.last = self.drawn = torch.zeros(len(winner), dtype=torch.float64)  # probability of the last race's winner

    def passes(self, node, probability, error, where):
        probability = probability.clamp(max=1.0)
        chosen = torch.where(self.passing[:, node], probability, 1 - probability)
        self.probability *= torch.where(where, chosen, 1.0)
        return where & self.passing[:, node]

    def race(self, weights, seed, position, row, streams):
        assert streams == (reference.RECOVER_BLOCK, reference.RECOVER_TOKEN)
        self.last = normalised(weights).gather(1, self.winner[:, None])[:, 0]
        return torch.where(weights.sum(-1) > 0, self.winner, -1), torch.ones(len(weights), dtype=torch.float64)

    def flat_race(self, weights, index, seed, position, offset, stream):
        assert (offset, stream) == (0, reference.RACE)
        self.weights[self.row] = normalised(weights)
        if self.start is None:
            winner = weights.argmax(-1)  # only greedy sequences walk
        else:
            (depth,) = set((position - self.start).tolist())
            winner = self.winner[:, depth]
        return winner, torch.ones(len(weights), dtype=torch.float64)


@dataclasses.dataclass
class TreeStep:
    """A step to test: a rule, a pair of models that depend on the whole text, and a tree."""

    rule: str
    target: Rows
    draft: Rows
    parents: Sequence[int]
    d2t: list[int] | None = None
    padding: int = 0  # nodes beyond num_nodes, children of the root

    def __post_init__(self):
        self.nodes: dict[int, list[int]] = {0: []}  # of the path to every row
        for node, parent in enumerate(self.parents):
            self.nodes[node + 1] = [*self.nodes[parent + 1], node]
        self.depth = max(map(len, self.nodes.values()))

    def children(self, row: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == row - 1]

    def draft_model(self, setting: Setting) -> Model:
        """The distribution of drafts by the plain definitions."""
        rows = self.draft
        if self.d2t is not None:
            rows = Rows(torch.full((len(rows.table), rows.base), -torch.inf), rows.base)
            rows.table[:, self.d2t] = self.draft.table
        return setting.model(rows)

    def numbers(self, rows: Rows, contexts: Sequence[Context], owner: torch.Tensor, tokens: torch.Tensor, row: int):
        """[R] the number of the text at a row of the tree, in ``rows``; 0 where there is none."""
        number = torch.tensor([rows.number(text) for _, text in contexts])[owner]
        for node in self.nodes[row]:
            number = number * rows.base + tokens[:, node] + 1
        gone = (tokens[:, self.nodes[row]] < 0).any(1)
        return torch.where(gone, 0, number)

    def drafts(self, probe: TreeProbe, contexts: Sequence[Context]):
        """(owner [R], tokens [R, N], mass [R]): every way in which the children of all nodes can be drawn."""
        owner, mass = torch.arange(len(contexts)), torch.ones(len(contexts), dtype=torch.float64)
        tokens = torch.full((len(contexts), len(self.parents)), -1)
        for row in self.nodes:
            children = self.children(row)
            if not children:
                continue
            columns = range(self.draft.table.shape[1])
            orders = torch.tensor(list(itertools.permutations(columns, min(len(children), len(columns)))))
            if self.rule == "walk":
                orders = orders[:1]
            each = torch.arange(len(owner)).repeat_interleave(len(orders))
            probe.order = orders.repeat(len(owner), 1)
            owner, tokens, mass = owner[each], tokens[each], mass[each]
            number = self.numbers(self.draft, contexts, owner, tokens, row)
            arguments = arguments_of(contexts, owner)
            out = draft_children(
                self.draft.table[number], len(children), arguments.pop("params"), offset=row,
                drafts=tokens[:, self.nodes[row]], d2t=None if self.d2t is None else torch.tensor(self.d2t),
                sampled=self.rule != "walk", **arguments,
            )  # fmt: skip
            there = (tokens[:, self.nodes[row]] >= 0).all(1)  # below a missing node, draws have no meaning
            tokens[:, children] = torch.where(there[:, None], out.tokens, -1)
            if self.rule != "walk":
                mass = mass * torch.where(there, probe.probability, 1 / len(orders))
        likely = (mass > 0).nonzero()[:, 0]
        return owner[likely], tokens[likely], mass[likely]

    def verify(self, contexts: Sequence[Context], owner: torch.Tensor, tokens: torch.Tensor):
        target, draft = (
            torch.stack([rows.table[self.numbers(rows, contexts, owner, tokens, r)] for r in self.nodes], 1)
            for rows in (self.target, self.draft)
        )
        if self.rule == "walk":
            draft = None
        parents, num_nodes = torch.tensor(self.parents, dtype=torch.int64), None
        if self.padding:
            num_nodes = torch.full_like(owner, len(parents))
            parents = torch.nn.functional.pad(parents, (0, self.padding), value=-1)
            tokens = torch.nn.functional.pad(tokens, (0, self.padding))
            target, draft = (
                None if t is None else torch.nn.functional.pad(t, (0, 0, 0, self.padding)) for t in (target, draft)
            )
        d2t = None if self.d2t is None or draft is None else torch.tensor(self.d2t)
        more = {"num_nodes": num_nodes, "d2t": d2t, "rule": self.rule, **arguments_of(contexts, owner)}
        return verify_tree(target, tokens, parents, draft, depth=self.depth, **more)

    def distributions(self, probe: TreeProbe, contexts: Sequence[Context]) -> list[Distribution]:
        """For every context, the distribution of what one step emits."""
        distributions: list[Distribution] = [defaultdict(float) for _ in contexts]
        outcomes = self.walks if self.rule == "walk" else self.tests
        for drafts in zip(*(column.split(AT_ONCE) for column in self.drafts(probe, contexts)), strict=True):
            self.add(distributions, *outcomes(probe, contexts, *drafts))
        return distributions

    @staticmethod
    def add(distributions: list[Distribution], owner, out, probability) -> None:
        possible = probability > 0
        assert (out.status[possible] == 0).all() and (out.num_emitted == out.num_accepted + 1)[possible].all()
        columns = (owner, out.tokens, out.path, out.num_emitted, probability)
        for b, emitted, path, count, p in zip(*(c[possible].tolist() for c in columns), strict=True):
            assert min(emitted[:count]) >= 0 and set(emitted[count:]) <= {-1} and set(path[count - 1 :]) <= {-1}
            distributions[b][tuple(emitted[:count])] += p

    def tests(self, probe: TreeProbe, contexts: Sequence[Context], owner, tokens, mass):
        """(owners, results, probabilities) for every node at which the path may end, and every token that follows."""
        rows, vocabulary = len(self.nodes), self.target.base
        choices = (len(owner), rows, vocabulary)
        each, end, winner = (c.flatten() for c in torch.meshgrid(*map(torch.arange, choices), indexing="ij"))
        passing = torch.zeros(rows, len(self.parents) + self.padding, dtype=torch.bool)
        for row, nodes in self.nodes.items():
            passing[row, nodes] = True
        probe.script(winner, passing[end])
        out = self.verify(contexts, owner[each], tokens[each])
        probability = mass[each] * probe.probability * probe.drawn
        # Where the tests could not go as scripted, the path ended elsewhere. Greedy paths have no choice.
        greedy = torch.tensor([context.setting.temperature == 0 for context in contexts])[owner[each]]
        probability = torch.where(self.ends(out) == end, probability, 0.0)
        return owner[each], out, torch.where(greedy, mass[each] * ((end == 0) & (winner == 0)), probability)

    def walks(self, probe: TreeProbe, contexts: Sequence[Context], owner, tokens, mass):
        """The same for rule ``walk``, for every token that may be drawn at each depth."""
        winners = torch.tensor(list(itertools.product(range(self.target.base), repeat=self.depth + 1)))
        choices = (len(owner), len(winners))
        each, choice = (c.flatten() for c in torch.meshgrid(*map(torch.arange, choices), indexing="ij"))
        position = torch.tensor([context.position() for context in contexts])[owner[each]]
        probe.script(winners[choice], position=position)
        out = self.verify(contexts, owner[each], tokens[each])
        nothing = torch.zeros(len(each), self.target.base, dtype=torch.float64)  # of rows that were not visited
        weights = torch.stack([probe.weights.get(row, nothing) for row in self.nodes], 1)
        probability = mass[each]
        for depth in range(self.depth + 1):
            row = torch.zeros_like(each) if depth == 0 else out.path[:, depth - 1] + 1
            drawn = weights[torch.arange(len(each)), row, winners[choice, depth]]
            # Draws that were not made must count once.
            once = (winners[choice, depth] == 0).double()
            probability = probability * torch.where(depth <= out.num_accepted, drawn, once)
        return owner[each], out, probability

    def ends(self, out) -> torch.Tensor:
        """[B] the row at which each path ended."""
        last = out.path.gather(1, (out.num_accepted.long() - 1).clamp(min=0)[:, None])[:, 0]
        return torch.where(out.num_accepted > 0, last + 1, 0)
