"""A comparison of ``draft_step``'s results with the reference's that allows for near-ties."""

from __future__ import annotations

import torch

from .. import DraftStep
from ..ops import RULES, SamplingTensors
from .inputs import NEAR_TIE, StepInputs, assert_statistics_close

# A bound of |l / T| in the rows whose statistics are compared, beyond |lse| and |log q|.
_LOGITS = 20.0


def reference_draft(
    inputs: StepInputs, logits: torch.Tensor, offset: int, compact: int = 0
) -> tuple[DraftStep, torch.Tensor]:
    """(the reference's ``draft_step`` on logits [B, V] for draft number ``offset``, [B] margins)."""
    from ..backends import reference

    outputs, margin = reference.draft_step_with_margin(
        logits, *inputs.sampling(), inputs.draft_tokens[:, :offset], inputs.d2t, inputs.seed, inputs.position,
        offset, RULES.index(inputs.rule), compact,
    )  # fmt: skip
    return DraftStep(*(outputs if compact else (*outputs[:5], None, None))), margin


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

    x = adjusted(
        logits, SamplingTensors(*inputs.sampling()), inputs.position, inputs.draft_tokens[:, :offset], inputs.d2t
    )
    kept = [(x >= step.cutoff[:, None])[sure] & (x > -torch.inf)[sure] for step in (actual, expected)]
    assert torch.equal(*kept), f"{context}: other tokens are kept"
    if expected.compact_ids is not None and expected.compact_log_q is not None:
        assert actual.compact_ids is not None and actual.compact_log_q is not None, f"{context}: no compact q"
        assert torch.equal(actual.compact_ids[sure], expected.compact_ids[sure]), f"{context}: other compact ids"
        assert_statistics_close(actual.compact_log_q[sure], expected.compact_log_q[sure], size[sure, None] + _LOGITS)
    return int(differs.sum())
