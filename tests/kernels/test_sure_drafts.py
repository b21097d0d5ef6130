"""Under top-p alone, rule ``token`` of backend ``cpu`` accepts most drafts without a cutoff (csrc/cpu/sure_drafts.cpp).
Where log-probabilities are asked for it cannot, as they need the cutoff. Both ways have to emit the same tokens."""

from __future__ import annotations

import pytest
import torch

from specdec_kernels import SamplingParams, draft_step, speculative_step
from specdec_kernels.testing import bits_of
from specdec_kernels.testing.inputs import random_table

NUM_DRAFTS = 4
INF, NAN = float("inf"), float("nan")


def some(values: tuple[float, ...], batch: int, generator: torch.Generator) -> torch.Tensor:
    return torch.tensor(values)[torch.randint(0, len(values), (batch,), generator=generator)]


def random_params(batch: int, penalties: bool, generator: torch.Generator) -> SamplingParams:
    """Mostly top-p alone, where near u = top_p the decision is not sure; other filters in between."""
    more = {"repetition_penalty": 1.3, "frequency_penalty": 0.2} if penalties else {}
    return SamplingParams(
        temperature=some((0.7, 1.0, 1.0, 0.0), batch, generator),
        top_p=some((0.5, 0.6, 0.9, 0.95, 0.999, 0.2, 1.0), batch, generator),
        top_k=some((0, 0, 0, 0, 0, 0, 20), batch, generator).int(),
        min_p=some((0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.2), batch, generator),
        **more,
    )


def random_rows(
    kind: str, batch: int, vocabulary: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the target and of the draft. The draft's are the target's in half of the sequences."""
    target = 2 * torch.randn(batch, NUM_DRAFTS + 1, vocabulary, generator=generator)
    if kind == "offset":
        target += 1e3
    if kind == "tied":
        target = target.round()
    noise = some((0.0, 0.0, 0.3, 2.0), batch, generator)[:, None, None]
    draft = target[:, :-1] + noise * torch.randn(batch, NUM_DRAFTS, vocabulary, generator=generator)
    if kind == "masked":
        target[..., torch.rand(vocabulary, generator=generator) < 0.5] = -INF
    if kind == "faulty":
        for rows in (target, draft):
            for i, fault in enumerate((NAN, INF, -INF)):
                rows[i::8, 1, slice(None) if fault == -INF else 5] = fault
    return target, draft


@pytest.mark.parametrize(
    ("kind", "form", "dtype"),
    [
        ("plain", "stats", torch.float32),
        ("plain", "recomputed", torch.bfloat16),
        ("plain", "reduced", torch.float32),
        ("plain", "one_hot", torch.float32),
        ("plain", "penalties", torch.float16),
        ("offset", "recomputed", torch.float32),
        ("tied", "stats", torch.bfloat16),
        ("masked", "recomputed", torch.float32),
        ("plain", "allowed", torch.float32),
        ("faulty", "stats", torch.float32),
        ("faulty", "recomputed", torch.float32),
        ("long", "stats", torch.float32),
    ],
)
def test_asking_for_log_probabilities_changes_no_token(kind, form, dtype):
    batch, vocabulary = (48, 20_000) if kind == "long" else (2048, 150)
    generator = torch.Generator().manual_seed(11)
    target, draft = (rows.to(dtype) for rows in random_rows(kind, batch, vocabulary, generator))
    params = random_params(batch, form == "penalties", generator)
    d2t = None
    if form == "reduced":
        d2t = torch.randperm(vocabulary, generator=generator)[: vocabulary // 2].sort().values
        draft = draft[..., d2t].contiguous()
    at = {"seed": torch.arange(batch), "position": torch.full((batch,), 3), "backend": "cpu"}
    if form == "penalties":
        at["table"] = random_table(batch, 6, vocabulary, at["position"], generator, NUM_DRAFTS)
    masks, allowed = {}, None
    if form == "allowed":
        allowed = bits_of(torch.rand(target.shape, generator=generator) < 0.5)
        masks = {"allowed": allowed, "masked_drafts": NUM_DRAFTS // 2}
    tokens, drawn = torch.zeros((batch, 0), dtype=torch.int64), []
    for i in range(NUM_DRAFTS):
        mask = allowed[:, i] if allowed is not None and i < NUM_DRAFTS // 2 else None
        drawn.append(draft_step(draft[:, i], params, offset=i, drafts=tokens, d2t=d2t, allowed=mask, **at))
        tokens = torch.cat([tokens, drawn[-1].tokens[:, None]], 1)
    stats = tuple(torch.stack([getattr(d, name) for d in drawn], 1) for name in ("cutoff", "lse"))
    # Some drafts that q never yields, and some that are no tokens.
    other = torch.randint(-1, vocabulary + 1, tokens.shape, generator=generator)
    tokens = torch.where(torch.rand(tokens.shape, generator=generator) < 0.1, other, tokens)
    logits, stats = None if form == "one_hot" else draft, stats if form == "stats" else None

    fast, whole = (
        speculative_step(
            target, tokens, logits, params=params, d2t=d2t, log_probs=log_probs, draft_stats=stats, **masks, **at
        )
        for log_probs in (False, True)
    )
    for name in ("tokens", "num_accepted", "num_emitted", "status"):
        assert torch.equal(getattr(fast, name), getattr(whole, name)), name
    assert 0 < fast.num_accepted.sum() < tokens.numel()
