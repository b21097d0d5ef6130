"""The public operations. Each validates, picks a backend, calls it, and names what comes back."""

from __future__ import annotations

import torch

from . import validation as check
from .backends import operation
from .ops import statistics_dtype
from .types import DraftStep, SamplingParams, SpeculativeStep


def draft_step(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    seed: int | torch.Tensor,
    position: int | torch.Tensor,
    offset: int,
    rule: str = "token",
    backend: str = "auto",
) -> DraftStep:
    """Draws the next draft token of every sequence from raw logits, and keeps what verification needs of q.

    q = softmax(logits / T); temperature 0 takes the largest logit (the lowest id of a tie). The draw is an exponential
    race in two levels over counter-based noise (docs/numerics.md), so a token depends on its own row, temperature,
    seed, position and offset alone: not on the batch, nor on the backend but for near-ties within rounding.

    Args:
        logits: [B, V] raw draft logits, float32, bfloat16 or float16 (float64 with ``backend="reference"``); any
            strides (a last dimension that is not dense is copied). -inf masks a token. Never written.
        params: temperature for the batch or for each sequence.
        seed: [B] int64 or one number for all: the sequence's key.
        position: [B] int64 or one number, >= 0: absolute position of the *step's* first token, the same for all K
            drafts.
        offset: which draft of the step this is, 0 .. K-1.
        rule: the accept rule that will verify: ``token``.
        backend: ``auto``, ``reference``, ``cpu`` or ``triton``. An explicit choice never falls back.

    Returns:
        DraftStep: tokens [B] int64, log_q, cutoff, lse [B] float32, status [B] int32. A row without a distribution
        (NaN, +inf, all -inf) has token -1, which ``speculative_step`` takes as the end of that sequence's drafts.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
        RuntimeError: the backend is not available; says what is missing.

    Reads each logit once, and one block of 1024 logits again.
    """
    check.check_logits("logits", logits, "[B, V]", reference=backend == "reference")
    check.check_rule(rule)
    batch, device = logits.shape[0], logits.device
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < 2**31:
        check.refuse("offset", repr(offset), "an integer from 0 to K - 1")
    return DraftStep(
        *operation("draft_step", backend, device.type)(
            logits,
            check.temperature_of(params, batch, device),
            check.per_sequence("seed", seed, batch, device, lowest=-(2**63)),
            check.per_sequence("position", position, batch, device, lowest=0),
            offset,
        )
    )


def speculative_step(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None,
    *,
    params: SamplingParams,
    seed: int | torch.Tensor,
    position: int | torch.Tensor,
    num_drafts: torch.Tensor | None = None,
    draft_stats: tuple[torch.Tensor, torch.Tensor] | None = None,
    rule: str = "token",
    backend: str = "auto",
) -> SpeculativeStep:
    """Verifies K drafted tokens of every sequence: softmax, acceptance and resampling in one operation on raw logits.

    Leviathan et al., arXiv 2211.17192, Algorithm 1 (= Chen et al., arXiv 2302.01318, Algorithm 2): draft x is accepted
    iff u q(x) < p(x); the first rejected position is recovered from max(0, p - q); after K acceptances a bonus token is
    drawn from p. At temperature 0 a draft is accepted iff it is the target's largest logit (lowest id of a tie).

    Args:
        target_logits: [B, K+1, V] raw logits; row i decides the token after i drafts. float32, bfloat16 or float16
            (float64 with ``backend="reference"``). Never written. K may be 0.
        draft_tokens: [B, K] int64 or int32. -1 or an id >= V ends that sequence's drafts there.
        draft_logits: [B, K, V], any of the dtypes, as ``draft_step`` drew from; None means one-hot drafts (n-gram,
            greedy draft models): q(x) = 1.
        params: temperature, for target and draft alike.
        seed, position: as in ``draft_step``; ``position`` is the absolute position of the token that row 0 decides.
        num_drafts: [B] int64 or int32 in 0 .. K: how many of the drafts count, for ragged batches. None: K.
        draft_stats: (cutoff, lse), [B, K] each, as ``draft_step`` returned them; None computes them again.
        rule: ``token``.
        backend: ``auto``, ``reference``, ``cpu`` or ``triton``. An explicit choice never falls back.

    Returns:
        SpeculativeStep: tokens [B, K+1] int64 (accepted drafts, one recovered or bonus token, then -1), num_accepted
        [B] int32, status [B] int32 (:class:`Status`).

    Raises:
        ValueError: names the argument, what was given and what is allowed.
        RuntimeError: the backend is not available; says what is missing.
    """
    check.check_logits("target_logits", target_logits, "[B, K+1, V]", reference=backend == "reference")
    check.check_rule(rule)
    (batch, rows, vocabulary), device = target_logits.shape, target_logits.device
    if rows < 1:
        check.refuse("target_logits", f"shape {list(target_logits.shape)}", "[B, K+1, V] with K >= 0")
    check.check_like("draft_tokens", draft_tokens, (batch, rows - 1), check.INTEGER_DTYPES, device)
    if draft_logits is not None:
        check.check_logits("draft_logits", draft_logits, "[B, K, V]", reference=backend == "reference")
        check.check_like("draft_logits", draft_logits, (batch, rows - 1, vocabulary), (draft_logits.dtype,), device)
    draft_lse = None
    if draft_stats is not None and draft_logits is not None:
        if not isinstance(draft_stats, (tuple, list)) or len(draft_stats) != 2:
            check.refuse("draft_stats", repr(draft_stats), "a pair (cutoff, lse)")
        cutoff, draft_lse = draft_stats
        dtypes = (statistics_dtype(draft_logits),)
        check.check_like("draft_stats cutoff", cutoff, (batch, rows - 1), dtypes, device)
        check.check_like("draft_stats lse", draft_lse, (batch, rows - 1), dtypes, device)
        check.check_cutoff(cutoff)
    elif draft_stats is not None:
        check.refuse("draft_stats", "statistics", "None where draft_logits is None (one-hot drafts)")
    if num_drafts is not None:
        check.check_like("num_drafts", num_drafts, (batch,), check.INTEGER_DTYPES, device)
        check.check_num_drafts(num_drafts, rows)
    return SpeculativeStep(
        *operation("speculative_step", backend, device.type)(
            target_logits,
            draft_tokens.to(torch.int64),
            draft_logits,
            draft_lse,
            None if num_drafts is None else num_drafts.to(torch.int64),
            check.temperature_of(params, batch, device),
            check.per_sequence("seed", seed, batch, device, lowest=-(2**63)),
            check.per_sequence("position", position, batch, device, lowest=0),
        )
    )
