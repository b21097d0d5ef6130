"""A comparison of ``draft_step``'s results with the reference's that allows for near-ties."""

from __future__ import annotations

import torch

from .. import DraftStep
from ..ops import RULES
from .inputs import NEAR_TIE, StepInputs, assert_statistics_close

# A bound of |l / T| in the rows whose statistics are compared, beyond |lse| and |log q|.
_LOGITS = 20.0


def reference_draft(inputs: StepInputs, logits: torch.Tensor, offset: int) -> tuple[DraftStep, torch.Tensor]:
    """(the reference's ``draft_step`` on logits [B, V] for draft number ``offset``, [B] margins)."""
    from ..backends import reference

    outputs, margin = reference.draft_step_with_margin(
        logits, inputs.sampling(), inputs.draft_tokens[:, :offset], inputs.d2t, inputs.allowed_to_draft(offset),
        inputs.seed, inputs.position, offset, RULES.index(inputs.rule),
    )  # fmt: skip
    return DraftStep(*outputs), margin


def assert_same_draft(
    actual: DraftStep,
    expected: DraftStep,
    margin: torch.Tensor,
    inputs: StepInputs,
    logits: torch.Tensor,
    offset: int,
    context: str = "",
) -> int:
    """Asserts that tokens, status and the kept tokens of q are equal, except in near-ties, and statistics equal up to
    rounding. ``expected`` and ``margin`` come from ``reference_draft``. Returns the number of drafts that differ by a
    near-tie."""
    near = margin < NEAR_TIE
    differs = actual.tokens != expected.tokens
    wrong = (differs & ~near | (actual.status != expected.status)).nonzero().flatten().tolist()
    if wrong:
        b = wrong[0]
        got, want = ((step.tokens[b].item(), step.status[b].item()) for step in (actual, expected))
        raise AssertionError(
            f"{context}: {len(wrong)} of {len(margin)} drafts differ beyond near-ties; the first is {b} (margin "
            f"{margin[b]:.2e}):\n  got  token and status {got}\n  want {want}"
        )
    sure = ~near & ~differs
    size = expected.lse.abs() + expected.log_q.abs()
    for name in ("log_q", "lse"):
        assert_statistics_close(getattr(actual, name)[sure], getattr(expected, name)[sure], size[sure] + _LOGITS)
    # Cutoffs may lie anywhere between the smallest logit that is kept and the next one.
    from ..backends.reference_distribution import adjusted

    before, allowed = inputs.draft_tokens[:, :offset], inputs.allowed_to_draft(offset)
    x = adjusted(logits, inputs.sampling(), inputs.position, before, inputs.d2t, allowed)
    kept = [(x >= step.cutoff[:, None])[sure] & (x > -torch.inf)[sure] for step in (actual, expected)]
    assert torch.equal(*kept), f"{context}: other tokens are kept"
    return int(differs.sum())
