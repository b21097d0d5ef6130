"""The public operations. Each checks its arguments, picks a backend, calls it and names the results."""

from __future__ import annotations

import torch

from . import validation as check
from .backends import operation
from .ops import SamplingTensors
from .types import DraftStep, SamplingParams, SpeculativeStep, TokenTable


def draft_step(
    logits: torch.Tensor,
    params: SamplingParams | SamplingTensors,
    *,
    seed: int | torch.Tensor,
    position: int | torch.Tensor,
    offset: int,
    rule: str = "token",
    table: TokenTable | None = None,
    drafts: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    backend: str = "auto",
) -> DraftStep:
    """Draws the next draft token of every sequence from raw logits, and returns what verification needs to know of q.

    q is the softmax of the logits after penalties, temperature and filters; at temperature 0 the largest logit is taken
    (the lowest id of a tie). The draw is an exponential race over counter-based noise (docs/numerics.md). A token
    therefore depends only on its own row, parameters, seed, position and offset, not on the rest of the batch. Backends
    return the same token, except for near-ties within rounding.

    Args:
        logits: [B, V] raw draft logits, float32, bfloat16 or float16 (float64 with ``backend="reference"``); any
            strides (a last dimension that is not dense is copied). -inf masks a token. Never written.
        params: sampling parameters, for the whole batch or for each sequence.
        seed: [B] int64, or one int for all sequences: the key of a sequence's noise. Rows with one seed and position
            share their noise, so equal logits draw equal tokens: for independent draws give each row a seed.
        position: [B] int64, or one int, >= 0: absolute position of the *step's* first token. It is the same for all K
            drafts of the step.
        offset: which draft of the step this is, 0 .. K-1.
        rule: the accept rule that will verify the draft: ``token``, ``block`` or ``coupled``.
        table: biases, bans and the counts for penalties, by ids of the target's vocabulary.
        drafts: [B, offset] int64 or int32: this step's drafts so far. Required with a ``table`` if offset > 0.
        d2t: [V] int64, ascending: for every id of a reduced draft vocabulary, the target's id (EAGLE-3, arXiv
            2503.01840). ``tokens`` are then the target's ids.
        allowed: [B, W] int32, W = ceil(V / 32): the tokens that may be drawn, as in ``speculative_step``. The bits are
            those of the target's ids, so with ``d2t`` W is that of the target's vocabulary. None: all may be.
        backend: ``auto``, ``reference``, ``cpu``, ``triton`` or ``cuda``. An explicit choice never falls back.

    Returns:
        DraftStep: tokens [B] int64, log_q, cutoff, lse [B] float32, status [B] int32. A row that has no distribution
        (it holds NaN or +inf, or only -inf, or allows nothing) gets token -1, which ``speculative_step`` takes as the
        end of that sequence's drafts.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
        RuntimeError: the backend is not available; says what is missing.

    Example:
        >>> import torch
        >>> from specdec_kernels import SamplingParams, draft_step
        >>> logits = torch.tensor([[0.0, 2.0, 1.0, -torch.inf], [3.0, 0.0, 0.0, 0.0]])  # B = 2, V = 4
        >>> draft_step(logits, SamplingParams(temperature=0.0), seed=0, position=7, offset=0).tokens.tolist()
        [1, 0]
        >>> drawn = draft_step(logits, SamplingParams(temperature=0.8, top_k=2), seed=0, position=7, offset=0)
        >>> drawn.cutoff.tolist(), bool((drawn.log_q <= 0).all())
        ([1.0, 0.0], True)
    """
    check.check_logits("logits", logits, "[B, V]", reference=backend == "reference")
    number = check.check_rule(rule)
    (batch, vocabulary), device = logits.shape, logits.device
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < 2**31:
        check.refuse("offset", repr(offset), "an integer from 0 to K - 1")
    sampling = check.sampling_of(params, table, batch, device)
    if sampling.table_ids is None:
        drafts = None  # only penalties depend on them
    elif drafts is not None:
        check.check_like("drafts", drafts, (batch, offset), check.INTEGER_DTYPES, device)
        drafts = check.as_int64(drafts)
    elif offset > 0:
        check.refuse("drafts", f"None with a table and offset={offset}", f"the step's drafts so far, [B, {offset}]")
    if d2t is not None:
        check.check_d2t(d2t, vocabulary, device)
    if allowed is not None:
        check.check_allowed(allowed, (batch,), vocabulary, device, d2t)
    return DraftStep(
        *operation("draft_step", backend, device.type)(
            logits,
            list(sampling),
            drafts,
            d2t,
            allowed,
            check.per_sequence("seed", seed, batch, device, lowest=-(2**63)),
            check.per_sequence("position", position, batch, device, lowest=0),
            offset,
            number,
        )
    )


def speculative_step(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None,
    *,
    params: SamplingParams | SamplingTensors,
    seed: int | torch.Tensor,
    position: int | torch.Tensor,
    num_drafts: torch.Tensor | None = None,
    draft_stats: tuple[torch.Tensor, torch.Tensor] | None = None,
    d2t: torch.Tensor | None = None,
    table: TokenTable | None = None,
    allowed: torch.Tensor | None = None,
    masked_drafts: int = 0,
    rule: str = "token",
    log_probs: bool = False,
    backend: str = "auto",
) -> SpeculativeStep:
    """Verifies K drafted tokens of every sequence: softmax, filters, acceptance and resampling in one operation on raw
    logits.

    ``token`` (Leviathan et al., arXiv 2211.17192, Algorithm 1 = Chen et al., arXiv 2302.01318, Algorithm 2) accepts
    draft x iff u q(x) < p(x). At the first rejection it draws a token from max(0, p - q); after K acceptances it draws
    a bonus token from p. ``block`` (Sun et al., arXiv 2403.10444, Algorithm 2) keeps the longest prefix of the drafts
    that passes its joint test. ``coupled`` (Daliri et al., arXiv 2408.07978) accepts a draft iff it wins the target's
    own race, whose noise depends on seed and absolute position alone. At temperature 0 every rule accepts a draft iff
    it has the target's largest logit (the lowest id of a tie).

    Args:
        target_logits: [B, K+1, V] raw logits, K >= 0; row i decides the token after i drafts. float32, bfloat16 or
            float16 (float64 with ``backend="reference"``). Never written.
        draft_tokens: [B, K] int64 or int32. -1 or an id >= V ends that sequence's drafts there.
        draft_logits: [B, K, V], in any of these dtypes: the logits that ``draft_step`` drew from. None means that
            drafts are one-hot (n-grams, greedy draft models): q(x) = 1. Must be None with ``coupled``, which needs no
            q.
        params: sampling parameters, of target and draft alike. A ``SamplingParams`` of tensors on a GPU reads their
            values once, when it is made, which waits for the GPU. For a CUDA graph it is therefore made before the
            capture; its tensors may change between replays, to values that are allowed.
        seed, position: as in ``draft_step``; ``position`` is the absolute position of the token that row 0 decides.
        num_drafts: [B] int64 or int32, 0 to K: how many drafts of each sequence count, for ragged batches. None: all K.
        draft_stats: (cutoff, lse), [B, K] each, as ``draft_step`` returned them. None: they are computed again.
        d2t: [draft vocabulary] int64, ascending; ``draft_logits`` is then [B, K, draft vocabulary].
        table: as in ``draft_step``; in row i the i drafts before it count as generated.
        allowed: [B, K+1, W] int32, W = ceil(V / 32): which tokens may follow after i drafts, as a grammar says it.
            Token v may iff bit v % 32 (0 is the lowest) of word v // 32 of row i is 1; bits beyond V have no effect.
            Any other token's logit counts as -inf, before penalties and filters, in p alone. A draft that may not
            follow is rejected, so the rows after it are never used. None: all may.
        masked_drafts: 0 to K: so many drafts of each sequence, from the first on, were drawn with this step's
            ``allowed``: draft i < masked_drafts with ``draft_step(allowed=allowed[:, i])``. In these rows of
            ``draft_logits`` the same tokens count as -inf. 0 without ``allowed`` or ``draft_logits``.
        rule: ``token``, ``block`` or ``coupled``.
        log_probs: also return the log-probabilities of the emitted tokens, under p and under softmax(raw logits), which
            ``allowed`` does not mask.
        backend: ``auto``, ``reference``, ``cpu``, ``triton`` or ``cuda``. An explicit choice never falls back.

    Returns:
        SpeculativeStep: tokens [B, K+1] int64 (accepted drafts, one recovered or bonus token, then -1), num_accepted,
        status (:class:`Status`) and num_emitted [B] int32, and with ``log_probs`` two float32 [B, K+1].

    Raises:
        ValueError: names the argument, what was given and what is allowed.
        RuntimeError: the backend is not available; says what is missing.

    Example:
        >>> import torch
        >>> from specdec_kernels import SamplingParams, draft_step, speculative_step
        >>> greedy = SamplingParams(temperature=0.0)
        >>> target = torch.eye(5)[None, [1, 2, 3, 4]]  # B = 1, K = 3, V = 5: the most likely tokens are 1, 2, 3, 4
        >>> drafts = torch.tensor([[1, 2, 0]])  # one-hot q: no logits
        >>> out = speculative_step(target, drafts, None, params=greedy, seed=0, position=7)
        >>> out.tokens.tolist(), out.num_accepted.tolist()  # two are accepted, and 3 replaces the rejected 0
        ([[1, 2, 3, -1]], [2])
        >>> params = SamplingParams(temperature=0.8)  # K = 1, drawn from q: verification is given the same logits
        >>> d = draft_step(target[:, 0], params, seed=0, position=7, offset=0)
        >>> stats = d.cutoff[:, None], d.lse[:, None]
        >>> out = speculative_step(
        ...     target[:, :2], d.tokens[:, None], target[:, :1], params=params, seed=0, position=7, draft_stats=stats
        ... )
        >>> out.num_accepted.tolist()  # p = q, so the draft is accepted with certainty
        [1]
    """
    check.check_logits("target_logits", target_logits, "[B, K+1, V]", reference=backend == "reference")
    number = check.check_rule(rule)
    (batch, rows, vocabulary), device = target_logits.shape, target_logits.device
    if rows < 1:
        check.refuse("target_logits", f"shape {list(target_logits.shape)}", "[B, K+1, V] with K >= 0")
    drafts = (batch, rows - 1)
    check.check_like("draft_tokens", draft_tokens, drafts, check.INTEGER_DTYPES, device)
    q = check.check_q(draft_logits, draft_stats, d2t, drafts, vocabulary, device, rule, backend)
    if allowed is not None:
        check.check_allowed(allowed, (batch, rows), vocabulary, device)
    most_masked = 0 if allowed is None or draft_logits is None else rows - 1
    if isinstance(masked_drafts, bool) or not isinstance(masked_drafts, int) or not 0 <= masked_drafts <= most_masked:
        check.refuse(
            "masked_drafts", repr(masked_drafts), f"0 to K = {rows - 1}, and 0 without allowed or draft_logits"
        )
    if num_drafts is not None:
        check.check_like("num_drafts", num_drafts, (batch,), check.INTEGER_DTYPES, device)
        check.check_counts("num_drafts", num_drafts, rows - 1, "K")
    *step, drawn, raw = operation("speculative_step", backend, device.type)(
        target_logits,
        check.as_int64(draft_tokens),
        *q,
        None if num_drafts is None else check.as_int64(num_drafts),
        list(check.sampling_of(params, table, batch, device)),
        allowed,
        masked_drafts,
        check.per_sequence("seed", seed, batch, device, lowest=-(2**63)),
        check.per_sequence("position", position, batch, device, lowest=0),
        number,
        bool(log_probs),
    )
    return SpeculativeStep(*step, *((drawn, raw) if log_probs else (None, None)))
