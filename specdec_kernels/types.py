"""The words of the public surface: sampling parameters, results, status flags.

p is the target model's distribution, q the draft's, both after temperature; B sequences, K drafts, V tokens.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Backend(enum.StrEnum):
    """Where an operation runs. ``auto`` picks the fastest that was built for the tensors' device; an explicit
    choice never falls back."""

    AUTO = "auto"
    REFERENCE = "reference"
    CPU = "cpu"
    TRITON = "triton"


class Rule(enum.StrEnum):
    """How drafts are accepted. ``token``: Leviathan et al. 2023, Algorithm 1 (= Chen et al. 2023, Algorithm 2)."""

    TOKEN = "token"


class Status(enum.IntFlag):
    """What went wrong in one sequence; 0 is fine.

    A fault of a target row ends the sequence there: nothing is emitted from that row. A fault of a draft ends that
    sequence's drafts there, and the token at that position is drawn from the target alone.
    """

    OK = 0
    TARGET_NAN = 1
    TARGET_POSITIVE_INFINITY = 2
    TARGET_EMPTY = 4  # the whole row is -inf
    DRAFT_NAN = 8
    DRAFT_POSITIVE_INFINITY = 16
    DRAFT_EMPTY = 32
    DRAFT_ZERO_PROBABILITY = 64  # q(x) = 0 for the proposed x: rejected, recovered from max(0, p - q)
    DRAFT_OUT_OF_RANGE = 128  # a draft token >= V or < -1 (-1 is the padding of a short draft, and is fine)


# float32 resolves l / T - lse to about |l / T| * 6e-8; below this temperature that is no longer a distribution.
MIN_TEMPERATURE = 1e-3

TARGET_FAULTS = Status.TARGET_NAN | Status.TARGET_POSITIVE_INFINITY | Status.TARGET_EMPTY


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, for a batch (numbers) or for each of its sequences ([B] tensors).

    Args:
        temperature: 0 is greedy; otherwise finite and >= 0.001. The same value holds for target and draft.
        top_k, top_p, min_p: filters. This version has none, so only their neutral values are allowed:
            ``None``, and 0, 1.0 and 0.0 in turn.

    Raises:
        ValueError: names the parameter, its value and what is allowed.
    """

    temperature: float | torch.Tensor = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        # Checked once here and not in every step: reading a tensor's values waits for its device.
        t, allowed = self.temperature, f"0 (greedy), or finite and >= {MIN_TEMPERATURE}"
        if isinstance(t, torch.Tensor):
            if t.dim() > 1 or not (t.is_floating_point() or t.dtype in (torch.int32, torch.int64)):
                raise ValueError(
                    f"temperature: got a {t.dtype} tensor of shape {list(t.shape)}, allowed: a number or [B]"
                )
            bad = ~torch.isfinite(t) | (t < MIN_TEMPERATURE) & (t != 0)
            if bad.any():
                raise ValueError(f"temperature: got {t[bad].tolist()[0]}, allowed: {allowed}")
        else:
            if isinstance(t, (int, float)) and t > torch.finfo(torch.float32).max:
                t = math.inf  # what the kernels' float32 makes of it
            if not isinstance(t, (int, float)) or not math.isfinite(t) or t < MIN_TEMPERATURE and t != 0:
                raise ValueError(f"temperature: got {t!r}, allowed: {allowed}")
        for name, neutral in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, torch.Tensor) or value != neutral):
                raise ValueError(f"{name}: got {value!r}; this version has no filters, allowed: None or {neutral}")


class DraftStep(NamedTuple):
    """What ``draft_step`` returns: the drawn tokens, and all that verification needs to know of q."""

    tokens: torch.Tensor  # [B] int64; -1 where the row has no distribution (see status)
    log_q: torch.Tensor  # [B] float32, natural log of the drawn token's probability; 0 at temperature 0
    cutoff: torch.Tensor  # [B] float32, tokens with logit / T below it are filtered out; -inf without a filter
    lse: torch.Tensor  # [B] float32, log sum exp(logit / T); at temperature 0 the largest logit
    status: torch.Tensor  # [B] int32, Status (the DRAFT_ flags)


class SpeculativeStep(NamedTuple):
    """What ``speculative_step`` returns."""

    tokens: torch.Tensor  # [B, K+1] int64: accepted drafts, then one recovered or bonus token, then -1
    num_accepted: torch.Tensor  # [B] int32
    status: torch.Tensor  # [B] int32, Status
