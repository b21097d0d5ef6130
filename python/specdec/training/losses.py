"""How far a draft's q is from the target's p, position by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..checks import refuse

SMALLEST = -80.0  # of a logarithm: e^-80 is nothing beside 1, and 0 times it is 0, where 0 times -inf would be NaN


@dataclass(frozen=True)
class Wanted:
    """The target's distribution at N positions: all of it, or its most likely tokens and the mass of the others.

    Attributes:
        log_p: [N, V] float32; or [N, k + 1], the last column for all tokens but k.
        ids: [N, k] int64: the tokens of the columns before the last one; None: a column for each token.
    """

    log_p: torch.Tensor
    ids: torch.Tensor | None = None

    @classmethod
    def of(cls, logits: torch.Tensor, top: int = 0) -> Wanted:
        """Of logits [..., V], with only the ``top`` most likely tokens told apart, or all of them for 0."""
        log_p = logits.flatten(0, -2).float().log_softmax(-1)
        if not top:
            return cls(log_p)
        best = log_p.topk(top)
        return cls(torch.cat((best.values, _rest(best.values)), -1), best.indices)


def _rest(log_p: torch.Tensor) -> torch.Tensor:
    """The logarithm of 1 minus the sum of e^log_p over the last dimension, which is kept."""
    mass = log_p.float().exp().sum(-1, keepdim=True)
    return torch.log1p(-mass.clamp(max=1 - 1e-6))


def outcomes(logits: torch.Tensor, wanted: Wanted) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log q and log p [N, n] of the outcomes that ``wanted`` tells apart, from the draft's logits [N, V]."""
    log_q = logits.float().log_softmax(-1)
    if wanted.ids is not None:
        log_q = log_q.gather(-1, wanted.ids)
        log_q = torch.cat((log_q, _rest(log_q)), -1)
    return log_q.clamp(min=SMALLEST), wanted.log_p.clamp(min=SMALLEST)


def forward_kl(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """sum p log(p / q), [N]."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """sum q log(q / p), [N]."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def total_variation(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """1 - sum min(p, q), [N]: the chance that a draft is rejected (Leviathan et al., arXiv 2211.17192, theorem 3.5)."""
    return (log_q.exp() - log_p.exp()).abs().sum(-1) / 2


DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
}
DATA = "data"
NO_COLUMN = -100
LOSSES = (DATA, *DIVERGENCES)


def loss_of(
    weights: Mapping[str, float], logits: torch.Tensor, wanted: Wanted | None, tokens: torch.Tensor
) -> torch.Tensor:
    """Returns the weighted mean loss over N positions, in nats (total variation: from 0 to 1).

    Where ``wanted`` does not tell all tokens apart, the divergences are those between its outcomes: lower bounds, and
    equal where q and p are proportional on the others. The losses are those of DistillSpec (arXiv 2310.08461, section
    3); ``data`` is the cross-entropy of the text.

    Args:
        weights: by the names in LOSSES.
        logits: the draft's, [N, V].
        wanted: the target's distributions; None where only ``data`` has a weight.
        tokens: [N] int64, the columns of the text's next tokens; NO_COLUMN where the draft does not know the token.
    """
    total = logits.new_zeros((), dtype=torch.float32)
    if DATA in weights and (tokens != NO_COLUMN).any():
        total = total + weights[DATA] * F.cross_entropy(logits.float(), tokens, ignore_index=NO_COLUMN)
    if wanted is not None:
        log_q, log_p = outcomes(logits, wanted)
        for name, divergence in DIVERGENCES.items():
            if name in weights:
                total = total + weights[name] * divergence(log_q, log_p).mean()
    return total


def read_mixture(name: str, given: str, allowed: tuple[str, ...]) -> dict[str, float]:
    """Returns weights that add up to 1, of "a" or "a:0.7,b:0.3". Raises ValueError naming ``name``."""
    found: dict[str, float] = {}
    for part in given.split(","):
        what, colon, number = part.strip().partition(":")
        try:
            weight = float(number) if colon else 1.0
        except ValueError:
            weight = -1.0
        if what not in allowed or what in found or not 0 < weight < float("inf"):
            refuse(
                name, repr(part.strip()), f"each once, with a weight > 0: {', '.join(f'{n}[:WEIGHT]' for n in allowed)}"
            )
        found[what] = weight
    total = sum(found.values())
    return {what: weight / total for what, weight in found.items()}
