"""Tokens from residuals in the Triton backend: visiting blocks best first gives the tokens of a full race, and rule
``block`` decides as if it summed up the residuals of all rows."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from support.arrangements import identical

from specdec_kernels import SamplingParams, draft_step
from specdec_kernels.testing import StepInputs, assert_same_step, random_step

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels keep their functions")


def rejected(
    vocabulary: int, spread: float, noise: float, sequences: int = 3, random_state: int = 0, one_hot: bool = False,
    d2t: torch.Tensor | None = None, **sampling,
) -> StepInputs:  # fmt: skip
    """Steps over one draft that is rejected, which are few of thousands where p and q are nearly equal. ``spread``: of
    p's logits; ``noise``: of what q's logits have in addition."""
    generator = torch.Generator().manual_seed(random_state)
    many = 6000 if noise < 0.05 else 400
    target = (spread * torch.randn((1, 2, vocabulary), generator=generator)).expand(many, 2, vocabulary)
    draft = target[:1, :1] + noise * torch.randn((1, 1, vocabulary), generator=generator)
    if d2t is not None:
        draft = draft[..., d2t]
    draft = draft.expand(many, 1, -1)
    params, seed = SamplingParams(temperature=0.9, **sampling), torch.arange(many)
    x = draft_step(draft[:, 0], params, seed=seed, position=5, offset=0, d2t=d2t).tokens[:, None]
    position = torch.full((many,), 5)
    inputs = StepInputs(target, x, None if one_hot else draft, params, seed, position, d2t=d2t)
    rows = (inputs.run("cpu").num_accepted == 0).nonzero().flatten()[:sequences]
    assert len(rows) == sequences
    return inputs.replace(
        target_logits=target[rows], draft_tokens=x[rows], draft_logits=None if one_hot else draft[rows],
        seed=seed[rows], position=position[rows],
    )  # fmt: skip


def agrees(monkeypatch, inputs: StepInputs) -> None:
    """With the reference, which races over all blocks; and bit for bit with a race in which no bound ends the
    visits."""
    from specdec_kernels.backends.triton import recover

    got, (want, margin) = inputs.run("triton"), inputs.reference()
    assert_same_step(got, want, margin)
    if not torch.cuda.is_available():
        monkeypatch.setattr(recover, "MARGIN", tl.constexpr(float("inf")))
        assert identical([t for t in inputs.run("triton") if t is not None], [t for t in got if t is not None])
        monkeypatch.undo()


SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 40]


@pytest.mark.parametrize(
    "blocks", [n if n in (1, 3, 9, 40) else pytest.param(n, marks=pytest.mark.nightly) for n in SIZES]
)
def test_any_number_of_blocks(monkeypatch, blocks):
    """The last block in part or whole; the number of blocks in multiples of those that are visited at once, or not."""
    for cut in (0, 1000, 517):
        agrees(monkeypatch, rejected(1024 * blocks - cut, 2.0, 0.8, sequences=2, random_state=blocks))


@pytest.mark.parametrize("noise", [3e-3, 0.02, 0.2, 1.0, 8.0])
def test_residuals_of_any_mass(monkeypatch, noise):
    """Total variations from about 1e-3 to nearly 1."""
    agrees(monkeypatch, rejected(20_000, 1.5, noise))


@pytest.mark.parametrize("spread", [0.0, 0.3, 12.0])
def test_flat_and_peaked_rows(monkeypatch, spread):
    """Also a row of equal logits, whose blocks differ in their noise alone."""
    agrees(monkeypatch, rejected(13_000, spread, 0.7))


FORMS = {
    "one_hot": {"one_hot": True, "spread": 3.0},
    "reduced": {"d2t": torch.arange(0, 13_000, 3)},
    "top_k": {"top_k": 40},
    "top_p": {"top_p": 0.8, "spread": 4.0},
    "min_p": {"min_p": 0.02},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_q_and_filters(monkeypatch, form):
    agrees(monkeypatch, rejected(13_000, **{"spread": 2.0, "noise": 1.0, "random_state": 3} | FORMS[form]))


def test_residuals_without_mass():
    """p = q but for a draft that p cannot have: all blocks are visited, none has a mass, and the token is drawn from
    p."""
    target = torch.zeros(3, 2, 9000)
    draft, x = target[:, :1].clone(), torch.full((3, 1), 4321)
    target[:, 0, 4321] = float("-inf")
    draft[:, 0, 4321] = -80.0
    inputs = StepInputs(target, x, draft, SamplingParams(), torch.arange(3), torch.zeros(3, dtype=torch.int64))
    out = inputs.run("triton")
    assert_same_step(out, *inputs.reference())
    assert out.num_accepted.tolist() == [0, 0, 0] and len(set(out.tokens[:, 0].tolist())) == 3


@interpreted
def test_few_blocks_are_visited(monkeypatch):
    """Of a peaked row with 40 blocks, at most 8 at once. On a flat row with a small residual it takes several
    visits."""
    from specdec_kernels.backends.triton import recover

    visits, usual = [], recover.load_p_and_q
    monkeypatch.setattr(recover, "load_p_and_q", lambda *rest: visits.append(1) or usual(*rest))
    rejected(40_000, 6.0, 2.0, sequences=1).run("triton")
    assert len(visits) == 1
    visits.clear()
    rejected(40_000, 0.2, 0.02, sequences=4).run("triton")
    assert len(visits) > 8


@interpreted
@pytest.mark.parametrize("kind", ["similar", "one_hot"])
def test_rule_block_needs_no_more_sums(monkeypatch, kind):
    """The same results as if every row's residual were summed up, and the reference's, which sums up all."""
    from specdec_kernels.backends.triton import sums

    usual, rows = sums.test_prefix, []

    def every_row(step, examined, b, j, w):
        u, kept, depends = usual(step, examined, b, j, w)
        state, flags, picked = sums.load_ending(step, examined, b, j)
        weighed = (state == sums.RECOVER) & (j > 0)
        return u, (kept & (weighed == 0)) | (j == 0), weighed

    def counted(step, examined, b, j, w):
        result = usual(step, examined, b, j, w)
        rows.append(bool(result[2].handle.data.item()))
        return result

    for state in range(3):
        inputs = random_step(4, 5, 1500, rule="block", kind=kind, random_state=state, temperature=1.2, drafter="cpu")
        monkeypatch.setattr(sums, "test_prefix", counted)
        got = inputs.run("triton")
        assert_same_step(got, *inputs.reference())
        monkeypatch.setattr(sums, "test_prefix", every_row)
        monkeypatch.setattr(sums, "kept_for_sure", lambda step, examined, b: b * 0)
        assert identical([t for t in inputs.run("triton") if t is not None], [t for t in got if t is not None])
        monkeypatch.undo()
    assert sum(rows) < len(rows) / 2
