"""Inputs of whole steps with a tree, and comparisons of backends that allow for near-ties."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch

from .. import DraftChildren, SamplingParams, TokenTable, TreeRule, TreeStep, draft_children, verify_tree
from ..ops import TREE_RULES
from .inputs import NEAR_TIE, BatchInputs, assert_statistics_close, device_of, on_cpu, random_table, spread

# A bound of |l / T| in the rows whose statistics are compared, beyond |lse| and |log q|.
_LOGITS = 20.0


@dataclasses.dataclass
class TreeInputs(BatchInputs):
    """All arguments of one ``verify_tree``."""

    target_logits: torch.Tensor
    node_tokens: torch.Tensor
    parents: torch.Tensor  # [B, N]
    draft_logits: torch.Tensor | None
    params: SamplingParams
    seed: torch.Tensor
    position: torch.Tensor
    num_nodes: torch.Tensor | None = None
    d2t: torch.Tensor | None = None
    table: TokenTable | None = None
    depth: int | None = None
    rule: str = "walk"

    def run(self, backend: str) -> TreeStep:
        """Runs the step on ``backend``; the results are moved to the CPU."""
        result = verify_tree(**self.to(device_of(backend)).arguments(), backend=backend)
        return TreeStep(**on_cpu(result._asdict()))

    def operands(self) -> tuple:
        """The arguments of the operation ``verify_tree``."""
        depth = self.node_tokens.shape[1] if self.depth is None else self.depth
        return (
            self.target_logits, self.node_tokens, self.parents, self.draft_logits, self.d2t, self.num_nodes,
            self.sampling(), self.seed, self.position, TREE_RULES.index(self.rule), depth,
        )  # fmt: skip

    def reference(self) -> tuple[TreeStep, torch.Tensor]:
        """(the reference's result, [B] its margins)."""
        from ..backends import reference_tree

        outputs, margin = reference_tree.verify_tree_with_margin(*self.operands())
        return TreeStep(*outputs), margin

    def draw_children(self, draft_logits: torch.Tensor, backend: str) -> TreeInputs:
        """The step with nodes that ``draft_children`` draws from draft_logits [B, N+1, V], row after row."""
        tokens = torch.full_like(self.node_tokens, -1)
        for members, parents in self.trees():
            inputs = self.rows(members).replace(node_tokens=tokens[members])
            for row in range(len(parents) + 1):
                children = [node for node, parent in enumerate(parents) if parent == row - 1]
                if children:
                    drawn = inputs.draft(draft_logits[members, row], row, path_of(parents, row), len(children), backend)
                    inputs.node_tokens[:, children] = drawn.tokens
            tokens[members] = inputs.node_tokens
        return self.replace(node_tokens=tokens)

    def rows(self, index: torch.Tensor) -> TreeInputs:
        """The sequences ``index`` of the batch."""
        return self.map(lambda t: t[index])

    def trees(self) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """Every tree of the batch: (the rows that have it, their parents)."""
        if self.parents.numel():
            trees, which = self.parents.unique(dim=0, return_inverse=True)
            for i, parents in enumerate(trees.tolist()):
                yield (which == i).nonzero()[:, 0], parents

    def draft(self, logits: torch.Tensor, row: int, path: Sequence[int], width: int, backend: str) -> DraftChildren:
        """Runs ``draft_children`` on ``backend`` for the row whose path from the root is given."""
        inputs, device = self.to(device_of(backend)), device_of(backend)
        drawn = draft_children(
            logits.to(device), width, inputs.params, seed=inputs.seed, position=inputs.position, offset=row,
            table=inputs.table, drafts=inputs.node_tokens[:, list(path)], d2t=inputs.d2t,
            sampled=self.rule != TreeRule.WALK, backend=backend,
        )  # fmt: skip
        return DraftChildren(**on_cpu(drawn._asdict()))

    def reference_draft(
        self, logits: torch.Tensor, row: int, path: Sequence[int], width: int
    ) -> tuple[DraftChildren, torch.Tensor]:
        """(what the reference makes of the same arguments, [B] margins)."""
        from ..backends import reference_tree

        outputs, margin = reference_tree.draft_children_with_margin(
            logits, self.sampling(), self.node_tokens[:, list(path)], self.d2t, self.seed, self.position,
            torch.full_like(self.seed, row), width, self.rule != TreeRule.WALK,
        )  # fmt: skip
        return DraftChildren(*outputs), margin


def path_of(parents: Sequence[int], row: int) -> list[int]:
    """The nodes from the root down to a row."""
    path = []
    while row > 0:
        path.append(row - 1)
        row = parents[row - 1] + 1
    return path[::-1]


def random_tree_step(
    parents: Sequence[int] | Sequence[Sequence[int]],
    batch: int,
    vocabulary: int,
    *,
    rule: str = "walk",
    dtype: torch.dtype = torch.float32,
    draft_dtype: torch.dtype | None = None,
    similar: bool = True,
    reduced: int = 0,
    table: int | None = None,
    random_state: int = 0,
    drafter: str = "reference",
    **sampling: float | Iterable[float],
) -> TreeInputs:
    """A random step on the CPU, with nodes drawn by ``draft_children``.

    Args:
        parents: of one tree, or of several, which take turns over the batch. All have the same number of nodes.
        similar: target = draft + noise; else the draft's most likely tokens are the target's least likely ones.
        reduced: the size of a reduced draft vocabulary; 0 is the whole vocabulary.
        table, sampling, drafter: as in ``random_step``.
    """
    generator = torch.Generator().manual_seed(random_state)
    tree = torch.tensor(parents, dtype=torch.int64)
    tree = tree.expand(batch, -1) if tree.dim() == 1 else tree[torch.arange(batch) % len(tree)]
    shape = (batch, tree.shape[1] + 1, vocabulary)
    target = 2 * torch.randn(shape, generator=generator)
    draft = (target if similar else -target) + torch.randn(shape, generator=generator)
    draft, target = draft.to(draft_dtype or dtype), target.to(dtype)
    seed = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator)
    position = torch.randint(0, 2**31 + 2**20, (batch,), generator=generator)
    params = SamplingParams(**{name: spread(value, name, batch) for name, value in sampling.items()})  # type: ignore[arg-type]
    nothing = torch.full(tree.shape, -1)
    inputs = TreeInputs(target, nothing, tree, None, params, seed, position, rule=rule)
    if table is not None:
        inputs.table = random_table(batch, table, vocabulary, position, generator, 3)
    if reduced:
        inputs.d2t = torch.randperm(vocabulary, generator=generator)[:reduced].sort().values
        draft = draft[..., inputs.d2t]
    inputs = inputs.draw_children(draft, drafter)
    return inputs.replace(d2t=None) if rule == TreeRule.WALK else inputs.replace(draft_logits=draft)


def assert_same_tree_step(actual: TreeStep, expected: TreeStep, margin: torch.Tensor, context: str = "") -> int:
    """Asserts that the results of each sequence are equal, except in near-ties. Returns the number of sequences that
    differ by a near-tie."""
    differs = torch.zeros_like(margin, dtype=torch.bool)
    for name in TreeStep._fields:
        differs |= (getattr(actual, name) != getattr(expected, name)).view(len(margin), -1).any(1)
    wrong = (differs & (margin >= NEAR_TIE)).nonzero().flatten().tolist()
    if wrong:
        b = wrong[0]
        got, want = ([t[b].tolist() for t in step] for step in (actual, expected))
        raise AssertionError(
            f"{context}: {len(wrong)} of {len(margin)} sequences differ beyond near-ties; the first is {b} (margin "
            f"{margin[b]:.2e}):\n  got  {got}\n  want {want}"
        )
    return int(differs.sum())


def assert_same_children(
    actual: DraftChildren, expected: DraftChildren, margin: torch.Tensor, context: str = ""
) -> int:
    """The same for ``draft_children``; statistics are equal up to rounding."""
    near = margin < NEAR_TIE
    differs = (actual.tokens != expected.tokens).any(1)
    wrong = (differs & ~near | (actual.status != expected.status)).nonzero().flatten().tolist()
    if wrong:
        b = wrong[0]
        got, want = ((step.tokens[b].tolist(), step.status[b].item()) for step in (actual, expected))
        raise AssertionError(f"{context}: row {b} (margin {margin[b]:.2e}):\n  got  {got}\n  want {want}")
    sure = ~near & ~differs
    assert_statistics_close(actual.lse[sure], expected.lse[sure], expected.lse[sure].abs() + _LOGITS)
    size = expected.lse[sure, None].abs() + expected.log_q[sure].abs().nan_to_num(posinf=0.0) + _LOGITS
    assert_statistics_close(actual.log_q[sure], expected.log_q[sure], size)
    return int(differs.sum())
