"""A seed or position given as a number holds for every sequence, so equal rows get equal tokens."""

from __future__ import annotations

import pytest
import torch

from specdec_kernels import SamplingParams, draft_step, speculative_step
from specdec_kernels.testing import device_of

BATCH, DRAFTS, VOCABULARY = 6, 2, 300


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 100), (-(2**63), 2**31)])
def test_one_number_is_that_of_every_sequence(backend, seed, position):
    device, generator = device_of(backend), torch.Generator().manual_seed(1)
    rows = torch.randn((1, DRAFTS + 1, VOCABULARY), generator=generator).to(device).expand(BATCH, -1, -1)
    one = {"seed": seed, "position": position}
    each = {name: torch.full((BATCH,), number, device=device) for name, number in one.items()}
    drafts, emitted = [], []
    for numbers in (one, each):
        drawn = draft_step(rows[:, 0], SamplingParams(), offset=0, backend=backend, **numbers).tokens
        tokens = drawn[:, None].expand(-1, DRAFTS)
        step = speculative_step(rows, tokens, None, params=SamplingParams(), backend=backend, **numbers)
        drafts.append(drawn.tolist()), emitted.append(step.tokens.tolist())
    assert drafts[0] == drafts[1] and emitted[0] == emitted[1]
    assert len(set(drafts[0])) == 1 and len(set(map(tuple, emitted[0]))) == 1
