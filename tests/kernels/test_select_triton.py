"""Triton's way to cutoffs: a list of candidates, and passes over rows that have too many for one."""

from __future__ import annotations

import pytest
import torch

from specdec_kernels import SamplingParams, draft_step
from specdec_kernels.backends.reference_distribution import cutoff_of
from specdec_kernels.testing import device_of

INF = float("inf")
LISTED = 1024  # logits that a list has room for


def check(logits: torch.Tensor, filters: list[tuple[int, float, float]], temperature: float = 1.0) -> torch.Tensor:
    """Compares the cutoff of a row with the reference's in float64, and lse. Returns the cutoffs."""
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*filters, strict=True))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    rows = logits.expand(len(filters), -1).to(device_of("triton"))
    out = draft_step(rows, params, seed=0, position=0, offset=0, backend="triton")
    scale = torch.full((len(filters),), temperature).double()
    want, _ = cutoff_of(rows.double().cpu(), scale, torch.tensor(filters))
    exact = min_p == 0.0  # what min-p cuts off is no logit, and rounded
    assert torch.equal(out.cutoff.double().cpu()[exact], want[exact])
    kept = rows.double().cpu() >= want[:, None]
    lse = (rows.double().cpu() / scale[:, None]).masked_fill(~kept, -INF).logsumexp(-1)
    torch.testing.assert_close(out.lse.double().cpu(), lse, atol=3e-6, rtol=3e-6)
    return out.cutoff


def normal(size: int, spread: float = 1.0, random_state: int = 0) -> torch.Tensor:
    return spread * torch.randn(size, generator=torch.Generator().manual_seed(random_state))


@pytest.mark.parametrize("number", [LISTED - 1, LISTED, LISTED + 1])
def test_lists_at_their_limit(number):
    """As many candidates as a list has room for, one less and one more: different ones, and a tie of all."""
    row = torch.full((2900,), -INF)
    row[torch.randperm(2900, generator=torch.Generator().manual_seed(number))[:number]] = normal(number)
    check(row, [(600, 1.0, 0.0), (number, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 1e-4)])
    tied = torch.where(row > -INF, 2.0, 0.0)
    cutoffs = check(tied, [(1, 1.0, 0.0), (1, 0.0, 0.0), (number + 1, 1.0, 0.0), (0, 0.5, 0.0)])
    assert cutoffs.tolist() == [2.0, 2.0, 0.0, 2.0]


@pytest.mark.parametrize("size", [1, 1023, 1025, 3100])
def test_equal_logits(size):
    filters = [(1, 1.0, 0.0), (size, 0.5, 0.0), (size + 7, 1.0, 0.0), (0, 0.3, 0.0), (0, 1.0, 1.0)]
    cutoffs = check(torch.full((size,), -1.25), filters)
    assert cutoffs[:4].tolist() == [-1.25] * 4


ROWS = {
    "flat": normal(4500, 0.1),
    "normal": normal(4500),
    "wide": normal(4500, 40.0),
    "levels": (2 * normal(4500)).round() / 2,
    "bits": normal(4500).bfloat16(),
    "masked": normal(4500).masked_fill(torch.arange(4500) % 7 == 3, -INF),
    "outliers": torch.where(torch.arange(4500) % 900 == 1, 3e38 * torch.sign(normal(4500)), normal(4500, 1e-3)),
    "tail": torch.where(torch.arange(4500) < 3, 9.0, normal(4500)),
}


@pytest.mark.parametrize("row", ROWS)
def test_rows_with_too_many_for_a_list(row):
    """Of 4,500 tokens, filters keep thousands. Passes narrow the interval down, by the logits and by their bits."""
    check(ROWS[row], [(2000, 1.0, 0.0), (3000, 0.8, 0.0), (0, 0.95, 0.0), (0, 0.3, 0.0)], temperature=1.5)


def test_a_row_does_not_depend_on_its_batch():
    """A row that is listed and one that takes passes have the same bits alone as among others."""
    logits = torch.stack([ROWS[name].float() for name in ("normal", "flat", "masked")]).to(device_of("triton"))
    values = {"top_k": torch.tensor([50, 0, 2000]), "top_p": torch.tensor([0.9, 0.95, 0.8])}
    together = draft_step(logits, SamplingParams(**values), seed=0, position=0, offset=0, backend="triton")
    for i in range(3):
        params = SamplingParams(**{name: value[i : i + 1] for name, value in values.items()})
        alone = draft_step(logits[i : i + 1], params, seed=0, position=0, offset=0, backend="triton")
        assert all(torch.equal(a[i : i + 1], b) for a, b in zip(together, alone, strict=True) if a is not None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="passes are counted in the interpreter")
def test_number_of_passes(monkeypatch):
    """Few candidates take none; a flat row takes few."""
    from specdec_kernels.backends.triton import select_flat

    passes, usual = [], select_flat.weigh
    monkeypatch.setattr(select_flat, "weigh", lambda *rest: passes.append(1) or usual(*rest))
    check(normal(9000, 2.0), [(50, 0.95, 0.0)])
    assert not passes
    check(normal(9000), [(0, 0.95, 0.0)])
    assert 1 <= len(passes) <= 3


@pytest.mark.parametrize("spread", [0.5, 8.0])
def test_top_p_alone(spread):
    """Of 313 parts the 256 best are listed first: all that a peaked row keeps, and too little of a flat one."""
    check(normal(40_000, spread), [(0, 0.9, 0.0)])
