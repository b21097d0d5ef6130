"""Rows that filters leave few candidates of (csrc/cuda/few.h): the cutoff is the reference's whatever the number of
candidates is, and such a row is read once to be measured, and then only where a part of it reaches the bound."""

from __future__ import annotations

import math

import pytest
import torch
from simt import kernels

from specdec_kernels import SamplingParams, draft_step
from specdec_kernels.testing import assert_same_step, assert_statistics_close, random_step
from specdec_kernels.types import DraftStep, SpeculativeStep

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves run")
INF = math.inf
VOCABULARY = 8192
FEW = 256


def drawn(logits: torch.Tensor, backend: str = "cuda", **setting) -> DraftStep:
    seeds = torch.arange(len(logits))
    return draft_step(logits, SamplingParams(**setting), seed=seeds, position=3, offset=0, backend=backend)


def check(logits: torch.Tensor, **setting) -> float:
    """Returns how often the rows were read."""
    kernels.take_counts()
    got = drawn(logits, **setting)
    loads = kernels.take_counts().loads
    want = drawn(logits, "reference", **setting)
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(got.cutoff, want.cutoff) or "min_p" in setting  # whose cutoff is rounded
    assert torch.equal(logits >= got.cutoff[:, None], logits >= want.cutoff[:, None])
    assert_statistics_close(got.lse, want.lse, want.lse.abs() + logits.masked_fill(logits == -INF, 0).abs().amax(-1))
    return loads / (logits.numel() * logits.element_size() / 16)


def peaks(number: int, heights: torch.Tensor | float, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """[1, vocabulary]: so many logits of these heights, anywhere, and others that weigh nothing beside them."""
    row = torch.full((1, vocabulary), -40.0)
    row[0, torch.randperm(vocabulary, generator=torch.Generator().manual_seed(number))[:number]] = heights
    return row


SETTINGS = {
    "top_k": {"top_k": 200},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.3},
    "both": {"top_k": 200, "top_p": 0.9},
    "all": {"top_k": 220, "top_p": 0.99, "min_p": 0.4},
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("number", [FEW - 1, FEW, FEW + 1])
def test_a_list_at_its_limit(number, setting):
    """One candidate more than are ranked, and what is kept is read once more to be summed."""
    candidates = peaks(number, torch.linspace(0.0, 1.0, number), 128 * 2 * FEW)
    reads = check(candidates, **setting)
    if "top_k" not in setting:  # whose bound leaves fewer
        assert (reads < 2) == (number <= FEW)


@pytest.mark.parametrize("number", [FEW - 1, FEW, FEW + 1, 5000])
@pytest.mark.parametrize(
    "setting", [{"top_k": 10}, {"top_k": 10, "top_p": 0.5}, {"top_k": 5}, {"top_k": 7, "min_p": 0.9}]
)
def test_many_logits_equal_to_the_last_that_is_kept(number, setting):
    """All of them are kept, or none, whether they are listed or not."""
    check(peaks(number, torch.cat([torch.arange(5.0) / 4 + 1.0, torch.ones(number - 5)])), **setting)


@pytest.mark.parametrize("vocabulary", [1, 7, 129, FEW, FEW + 1, 3083])
@pytest.mark.parametrize(
    "setting",
    [
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 2**20},
        {"top_p": 0.5},
        {"top_p": 0.0},
        {"min_p": 1.0},
        {"top_k": 1, "top_p": 0.3},
    ],
    ids=str,
)
def test_equal_logits(vocabulary, setting):
    check(torch.full((1, vocabulary), 0.7), **setting)
    check(torch.full((1, vocabulary), -0.0), **setting)


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 129, FEW - 1, FEW + 1, 1023, 1025, 3083])
def test_any_vocabulary(vocabulary):
    """The largest logits are the first and the last, and k is anything from 1 to more than there are."""
    generator = torch.Generator().manual_seed(vocabulary)
    for k in {1, 2, vocabulary // 2 + 1, vocabulary, vocabulary + 1}:
        row = torch.randn(2, vocabulary, generator=generator)
        row[:, 0], row[:, -1] = 5.0, 6.0
        for more in ({}, {"top_p": 0.9}):
            check(row, top_k=k, **more)


@pytest.mark.parametrize("finite", [1, 2, 3, 40, 300])
@pytest.mark.parametrize(
    "setting", [{"top_k": 2}, {"top_k": 50}, {"top_k": 4000}, {"top_p": 0.8}, {"min_p": 0.2}], ids=str
)
def test_banned_tokens_are_no_candidates(finite, setting):
    row = peaks(finite, torch.randn(finite, generator=torch.Generator().manual_seed(finite)), 3000)
    check(row.masked_fill(row == -40.0, -INF), **setting)


def test_the_parts_that_reach_the_bound_are_read():
    """An ordinary row with top-k 50 is measured, and then not a fourth of it is read, at once."""
    row = 2 * torch.randn(1, 60_000, generator=torch.Generator().manual_seed(1))
    for setting in ({"top_k": 50}, {"top_k": 50, "top_p": 0.95}, {"top_k": 50, "min_p": 0.01}):
        assert check(row, temperature=0.8, **setting) < 1.25


@pytest.mark.parametrize("outlier", [9.0, 60.0, 1e6])
def test_a_bound_beside_an_outlier(outlier):
    """Which stretches the bins of the bound: the more are the candidates, but the cutoff is the same."""
    row = 2 * torch.randn(1, 30_000, generator=torch.Generator().manual_seed(2))
    row[0, 17_000], row[0, 3] = outlier, -outlier
    check(row, top_k=50, temperature=2.0)


def test_top_p_of_a_peaked_row_is_decided_by_few_parts():
    zipf = -1.4 * torch.arange(1.0, 40_001.0).log()
    row = zipf[torch.randperm(40_000, generator=torch.Generator().manual_seed(3))][None]
    for top_p in (0.0, 0.3, 0.8, 0.9):
        assert check(row, top_p=top_p) < 1.6


@pytest.mark.parametrize("top_p", [0.04, 0.06, 0.5, 0.95, 0.9999])
def test_top_p_that_few_parts_do_not_reach(top_p):
    """One token weighs as much as 1,000 others, of which there are 20,000, so that the trial fails but for the smallest
    top_p."""
    generator = torch.Generator().manual_seed(4)
    row = math.log(1e-3) + 0.1 * torch.randn(1, 20_000, generator=generator)
    row[0, 777] = 0.0
    check(row, top_p=top_p)


def test_bits_depend_on_the_row_alone():
    """Neither on the number of threads, nor on where a row lies, its dtype, or masks that allow all."""
    rows = (2 * torch.randn(3, 5003, generator=torch.Generator().manual_seed(5))).bfloat16()
    rows[2] = (rows[2].float() * 3).bfloat16()
    wide = torch.zeros(3, 5004 + 4, dtype=torch.bfloat16)
    unaligned, aligned = wide[:, 1:5004].copy_(rows), torch.zeros(3, 5008, dtype=torch.bfloat16)[:, :5003].copy_(rows)
    everything = torch.full((3, (5003 + 31) // 32), -1, dtype=torch.int32)
    for setting in ({"top_k": 50, "top_p": 0.95}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 200}):
        want = drawn(aligned, **setting)
        for row, more in ((unaligned, {}), (rows.float(), {}), (aligned, {"allowed": everything})):
            for _ in kernels.THREADS:
                got = draft_step(
                    row, SamplingParams(**setting), seed=torch.arange(3), position=3, offset=0, backend="cuda", **more
                )
                assert all(map(torch.equal, got[:4], want[:4])), setting
        assert torch.equal(drawn(aligned[1:2].contiguous(), **setting).lse, want.lse[1:2])


@pytest.mark.parametrize("rule", ["token", "block"])
def test_masks_and_penalties(rule):
    """Rows that are read by blocks."""
    inputs = random_step(
        5, 2, 5001, rule=rule, drafter="cpu", allowed=0.5, masked_drafts=2, table=40, repetition_penalty=1.3,
        top_k=(0, 40, 300), top_p=(0.9, 1.0, 0.95), min_p=(0.0, 0.02),
    )  # fmt: skip
    want, margin = inputs.reference()
    got = SpeculativeStep(*kernels.speculative_step(*inputs.operands(), threads=64))
    assert_same_step(got, want, margin)
