"""The training-time test (EAGLE-3, arXiv 2503.01840, section 3.2): a head whose drafts take one forward each goes on
from its own outputs, as it will when it drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...drafters.heads.in_turn import DraftsInTurn
from ...drafters.heads.interface import HeadInput
from ...models.forward.layout import Layout
from .learner import DECAY, GrowingCache, Lesson, agreement, loss_between


def learn_in_turn(
    head: DraftsInTurn, lesson: Lesson, depth: int, weights: Mapping[str, float]
) -> tuple[torch.Tensor, list[float]]:
    """Returns the loss, and how often the token of each depth is the target's.

    Row t begins with the pair of the feature of token t and token t + 1, which is about token t + 2. At depth i it has
    gone on to the pair of its own output and token t + 1 + i. It sees the true pairs up to t, and what it made itself
    since, which no other row sees.
    """
    size, length = lesson.tokens.shape
    rows, device = length - depth, lesson.tokens.device
    features = head.combine(lesson.states)[:, :rows]
    causal = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
    itself = torch.eye(rows, dtype=torch.bool, device=device)
    cache: Any = GrowingCache(head.num_layers)
    total, hits = features.new_zeros(()), []
    for i in range(depth):
        places = (torch.arange(rows, device=device) + i).expand(size, -1)
        mask = torch.cat([causal] + [itself] * i, 1)[None, None]
        tokens = lesson.tokens[:, 1 + i : 1 + i + rows]
        out = head.run(HeadInput(features, tokens, Layout(places, places, mask.shape[-1], mask)), cache)
        ours, log_p = head.logits(out), lesson.log_p[:, 1 + i : 1 + i + rows]
        total = total + DECAY**i * loss_between(weights, ours, log_p)
        hits.append(agreement(ours, log_p))
        features = head.recycled(out)
    return total, hits
