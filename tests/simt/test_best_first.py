"""Best block first (csrc/cuda/decide.h): a token that is recovered is that of the race over all blocks of the residual,
which `reference` runs, however few of them are visited; and rule `block`, which sums the residuals that decide alone
(csrc/cuda/sums.h), keeps as many drafts as the rule that sums all."""

from __future__ import annotations

import pytest
import torch
from simt import kernels

from specdec_kernels.testing import StepInputs, assert_same_step, random_step
from specdec_kernels.types import SpeculativeStep

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves run")


def check(inputs: StepInputs, threads: int = 64) -> SpeculativeStep:
    want, margin = inputs.reference()
    got = SpeculativeStep(*kernels.speculative_step(*inputs.operands(), threads=threads))
    assert_same_step(got, want, margin)
    return got


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8, 13, 17, 26, 33, 40])
def test_any_number_of_blocks(blocks):
    """The last one is whole, has one logit, or some; a round visits fewer blocks than there are."""
    for less in (0, 1023, 301):
        inputs = random_step(
            4, 1, 1024 * blocks - less, kind="opposite", stats=True, random_state=blocks, drafter="cpu"
        )
        check(inputs, threads=(32, 96, 256)[blocks % 3])


@pytest.mark.parametrize("vocabulary", [2049, 2050, 3083])
def test_the_last_logit_of_a_row(vocabulary):
    """It is the largest, and all but the whole mass."""
    for temperature in (0.0, 1.0):
        inputs = random_step(2, 1, vocabulary, temperature=temperature, drafter="cpu")
        inputs.target_logits[..., -1] = 30.0
        check(inputs)


def test_each_sequence_has_the_rows_that_its_drafts_lead_to():
    inputs = random_step(4, 2, 2100, stats=True, drafter="cpu")
    check(inputs.replace(num_drafts=torch.tensor([0, 1, 2, 1])))


@pytest.mark.parametrize("noise", [1e-3, 1e-2, 0.1, 1.0, 10.0])
def test_any_total_variation(noise):
    """From rows that are all but equal, of which many blocks are visited, to others, of which the first one wins."""
    generator = torch.Generator().manual_seed(5)
    inputs = random_step(12, 1, 9000, stats=True, drafter="cpu")
    target = inputs.draft_logits + noise * torch.randn(inputs.draft_logits.shape, generator=generator)
    target[:, 0].scatter_(1, inputs.draft_tokens, -6.0)  # so that the draft is rejected, mostly
    accepted = check(inputs.replace(target_logits=torch.cat([target, target], 1))).num_accepted
    assert (accepted == 0).sum() >= 6


@pytest.mark.parametrize("rule", ["token", "block"])
def test_blocks_that_lead_but_have_no_residual(rule):
    """q is larger than p in all tokens of every other block, and others have more or less of a residual: those that
    lead under p mostly lose."""
    generator = torch.Generator().manual_seed(3)
    inputs = random_step(24, 2, 20_300, drafter="cpu", rule=rule, stats=True)
    by_block = 0.3 * torch.randn(24, 3, 20, generator=generator).repeat_interleave(1024, -1)
    target = torch.cat([inputs.draft_logits, inputs.draft_logits[:, :1]], 1) + by_block[..., :20_300]
    accepted = check(inputs.replace(target_logits=target), threads=32).num_accepted
    assert (accepted < 2).sum() >= 4


@pytest.mark.parametrize("rule", ["token", "block"])
def test_reduced_vocabularies(rule):
    generator = torch.Generator().manual_seed(3)
    inputs = random_step(24, 2, 12_800, drafter="cpu", rule=rule, reduced=6000, stats=True)
    by_block = torch.where(torch.rand(24, 3, 13, generator=generator) < 0.25, 1.5, -0.3).repeat_interleave(1024, -1)
    check(inputs.replace(target_logits=inputs.target_logits + by_block[..., :12_800]))


def test_equal_rows_are_accepted():
    inputs = random_step(8, 3, 5000, stats=True, drafter="cpu")
    inputs = inputs.replace(target_logits=torch.cat([inputs.draft_logits, inputs.draft_logits[:, :1]], 1))
    assert (check(inputs).num_accepted == 3).all()


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("threads", [32, 128])
def test_a_residual_without_mass_accepts_the_draft(rule, threads):
    """Of q, the lse that was handed over is smaller than p's, so that q > p everywhere. Every block is visited, in
    several rounds, and then the draft is accepted; the next one is tested as always."""
    inputs = random_step(24, 3, 5000, stats=True, rule=rule, drafter="cpu")
    cutoff, lse = inputs.draft_stats
    inputs = inputs.replace(
        target_logits=torch.cat([inputs.draft_logits, inputs.draft_logits[:, :1]], 1),
        draft_stats=(cutoff, lse - torch.tensor([0.9, 0.0, 0.9])),
    )
    got = check(inputs, threads)
    assert (got.num_accepted == 3).all() and (got.tokens[:, :3] == inputs.draft_tokens).all()


@pytest.mark.parametrize(
    "form",
    [
        {"kind": "one_hot"},
        {"reduced": 3000, "stats": True},
        {"stats": True, "top_k": (0, 40, 300), "top_p": (0.9, 1.0, 0.95)},
        {"top_p": 0.8, "kind": "opposite"},
        {"kind": "opposite", "dtype": torch.bfloat16, "draft_dtype": torch.float16},
        {"kind": "opposite", "table": 40, "repetition_penalty": 1.3, "allowed": 0.5, "masked_drafts": 2},
    ],
    ids=["one_hot", "reduced", "filters", "top_p", "mixed", "adjusted"],
)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_every_form_of_q(rule, form):
    check(random_step(6, 2, 7001, rule=rule, drafter="cpu", **form))


@pytest.mark.parametrize("kind", ["similar", "opposite"])
@pytest.mark.parametrize("stats", [False, True])
def test_rule_block_sums_the_rows_that_decide(kind, stats):
    """Of long chains of drafts, some of whose prefixes are kept whatever the residuals are."""
    check(random_step(96, 6, 300, rule="block", kind=kind, stats=stats, drafter="cpu"), threads=32)
