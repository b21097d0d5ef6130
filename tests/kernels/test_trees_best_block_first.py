"""Tokens from residuals after rejected siblings in the Triton backend: visiting blocks best first gives the tokens of a
full race, and a row's residual is weighed as a whole only where a decision depends on its mass."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from support.arrangements import INF, identical

from specdec_kernels import SamplingParams
from specdec_kernels.testing import TreeInputs, assert_same_tree_step

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels keep their functions")
TWINS, FORK = (-1, -1), (-1, -1, 0, 0)


def rejected(
    vocabulary: int, spread: float, noise: float, sequences: int = 2, random_state: int = 0, rule: str = "token",
    parents: tuple[int, ...] = FORK, d2t: torch.Tensor | None = None, likely: bool = False, **sampling,
) -> TreeInputs:  # fmt: skip
    """Steps whose path ends in a row all of whose children are rejected. All rows of p are equal, and those of q.
    ``spread``: of p's logits; ``noise``: of what q's logits have in addition; ``likely``: q has few tokens."""
    generator, nodes = torch.Generator().manual_seed(random_state), len(parents)
    many = 6000 if noise < 0.05 else 200
    target = spread * torch.randn((1, 1, vocabulary), generator=generator)
    draft = target + noise * torch.randn((1, 1, vocabulary), generator=generator)
    draft = draft if d2t is None else draft[..., d2t]
    draft = draft.masked_fill(draft < draft.topk(2).values[..., -1:], -INF) if likely else draft
    inputs = TreeInputs(
        target.expand(many, nodes + 1, -1), torch.full((many, nodes), -1), torch.tensor(parents).expand(many, -1),
        draft.expand(many, nodes + 1, -1), SamplingParams(temperature=0.9, **sampling), torch.arange(many),
        torch.full((many,), 5), d2t=d2t, rule=rule,
    )  # fmt: skip
    inputs = inputs.draw_children(inputs.draft_logits, "cpu")
    path = inputs.run("cpu").path
    last = torch.where(path >= 0, path, -1).gather(1, (path >= 0).sum(1, keepdim=True).sub(1).clamp(min=0))
    rows = torch.isin(last[:, 0], torch.tensor(parents)).nonzero().flatten()[:sequences]
    assert len(rows) == sequences
    return inputs.rows(rows)


def agrees(monkeypatch, inputs: TreeInputs) -> None:
    """With the reference, which races over all blocks; and bit for bit with a race in which no bound ends the
    visits."""
    from specdec_kernels.backends.triton import recover

    got = inputs.run("triton")
    assert_same_tree_step(got, *inputs.reference())
    if not torch.cuda.is_available():
        monkeypatch.setattr(recover, "MARGIN", tl.constexpr(INF))
        assert identical(inputs.run("triton"), got)
        monkeypatch.undo()


def some_nightly(values, everyday):
    return [v if v in everyday else pytest.param(v, marks=pytest.mark.nightly) for v in values]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("blocks", some_nightly([1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 40], (1, 5)))
def test_any_number_of_blocks(monkeypatch, blocks, rule):
    """The last block in part or whole; the number of blocks in multiples of those that are visited at once, or not."""
    for cut in (0, 517):
        agrees(monkeypatch, rejected(1024 * blocks - cut, 2.0, 0.8, 1, random_state=blocks, rule=rule))


@pytest.mark.parametrize("noise", some_nightly([3e-3, 0.02, 0.2, 1.0, 8.0], (0.2, 8.0)))
def test_residuals_of_any_mass(monkeypatch, noise):
    """Total variations from about 1e-3 to nearly 1."""
    agrees(monkeypatch, rejected(9_000, 1.5, noise, parents=TWINS))


@pytest.mark.parametrize("spread", [0.0, pytest.param(0.3, marks=pytest.mark.nightly), 12.0])
def test_flat_and_peaked_rows(monkeypatch, spread):
    """Also a row of equal logits, whose blocks differ in their noise alone."""
    agrees(monkeypatch, rejected(9_000, spread, 0.7, parents=TWINS))


FORMS = {
    "one_token_of_q_is_left": {"likely": True},
    "reduced": {"d2t": torch.arange(0, 7000, 3)},
    "top_k": {"top_k": 40},
    "top_p": {"top_p": 0.8, "spread": 4.0},
    "min_p": {"min_p": 0.02},
}


@pytest.mark.parametrize("rule", ["token", pytest.param("block", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_q_and_filters(monkeypatch, form, rule):
    options = {"spread": 2.0, "noise": 1.0, "random_state": 3, "parents": TWINS, "rule": rule} | FORMS[form]
    agrees(monkeypatch, rejected(7000, **options))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_residuals_without_mass(rule):
    """p = q but for a child that p cannot have, the only one: all blocks are visited, none has a mass, and the token is
    drawn from p, as if the child were not there."""
    target = torch.zeros(3, 2, 5000)
    draft, x = target.clone(), torch.full((3, 1), 4321)
    target[:, 0, 4321] = -INF
    draft[:, 0, 4321] = -80.0
    inputs = TreeInputs(
        target, x, torch.full((3, 1), -1), draft, SamplingParams(), torch.arange(3), torch.zeros(3, dtype=torch.int64),
        rule=rule,
    )  # fmt: skip
    out = inputs.run("triton")
    assert_same_tree_step(out, *inputs.reference())
    assert out.num_accepted.tolist() == [0, 0, 0] and len(set(out.tokens[:, 0].tolist())) == 3


@interpreted
@pytest.mark.parametrize("rule", ["token", "block"])
def test_few_blocks_are_visited(monkeypatch, rule):
    """Of 40 blocks of a peaked row, four at once: all only for the child that comes after a rejection."""
    from specdec_kernels.backends.triton import recover

    visits, usual = [], recover.load_p_and_q
    monkeypatch.setattr(recover, "load_p_and_q", lambda *rest: visits.append(1) or usual(*rest))
    for parents, most in (((-1,), 2), (TWINS, 12)):
        visits.clear()
        rejected(40_000, 6.0, 2.0, 1, rule=rule, parents=parents).run("triton")
        assert most - 2 < len(visits) <= most


@interpreted
def test_nodes_that_fail_whatever_remains(monkeypatch):
    """Rule `block`: the residual of a node's row is weighed as a whole only if its number is below its joint ratio."""
    from specdec_kernels.backends.triton import siblings

    whole, usual = [], siblings.best_residual

    def counted(*rest):
        whole.append(bool(rest[9].handle.data.item()))
        return usual(*rest)

    inputs = rejected(300, 2.0, 1.5, 12, rule="block", parents=(-1, 0))
    monkeypatch.setattr(siblings, "best_residual", counted)
    assert_same_tree_step(inputs.run("triton"), *inputs.reference())
    assert 0 < sum(whole) < 6


@interpreted
def test_likely_children_come_from_few_blocks(monkeypatch):
    """As many blocks are read as there are children, wherever these are."""
    from specdec_kernels import draft_children
    from specdec_kernels.backends.triton import draft_children as module

    read, usual = [], module.scores_of
    monkeypatch.setattr(module, "scores_of", lambda *rest: read.append(1) or usual(*rest))
    logits = torch.randn(1, 9000, generator=torch.Generator().manual_seed(0))
    options = {"seed": 0, "position": 0, "offset": 0, "backend": "triton"}
    out = draft_children(logits, 5, SamplingParams(), **options, sampled=False)
    assert out.tokens.tolist() == logits.topk(5).indices.tolist() and len(read) == 5
