"""The words of the public surface: sampling parameters, results, status flags.

p is the target model's distribution, q the draft's, both after temperature; B sequences, K drafts, V tokens.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, NoReturn, cast

import torch


class Backend(enum.StrEnum):
    """Where an operation runs. ``auto`` picks the fastest that was built for the tensors' device (``cuda``, then
    ``triton``, then ``reference`` on a GPU); an explicit choice never falls back."""

    AUTO = "auto"
    REFERENCE = "reference"
    CPU = "cpu"
    TRITON = "triton"
    CUDA = "cuda"


class Rule(enum.StrEnum):
    """How drafts are accepted. The emitted text has the target's distribution under all three.

    ``token``: Leviathan et al. 2023, Algorithm 1 (= Chen et al. 2023, Algorithm 2), draft by draft.
    ``block``: Sun et al., ICLR 2025, Algorithm 2: drafts jointly; accepts at least as many in expectation.
    ``coupled``: Daliri et al. 2024: draft and target race with the same noise, which is keyed by the absolute position.
    Needs no q, and the text is the one that plain sampling with that seed gives, token for token.
    """

    TOKEN = "token"
    BLOCK = "block"
    COUPLED = "coupled"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ValueError(f"rule: got {value!r}, allowed: {', '.join(repr(str(rule)) for rule in cls)}")


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

    TARGET_FAULTS = enum.nonmember(
        TARGET_NAN | TARGET_POSITIVE_INFINITY | TARGET_EMPTY
    )  # int: any of them ends the sequence


# float32 resolves l / T - lse to about |l / T| * 6e-8; below this temperature that is no longer a distribution.
MIN_TEMPERATURE = 1e-3


def _limits(name: str, neutral: float | None, low: float, high: float, allowed: str, integer: bool = False):
    return name, (neutral, low, high, allowed, integer)


_LARGEST = torch.finfo(torch.float32).max
# name -> (its neutral value, lowest, highest, in words, whether it is an integer)
_LIMITS = dict(
    (
        _limits("temperature", None, MIN_TEMPERATURE, _LARGEST, f"0 (greedy), or finite and >= {MIN_TEMPERATURE}"),
        _limits("top_k", 0, 1, 2**24, "an integer >= 1, or 0 (off)", integer=True),
        _limits("top_p", 1.0, 0.0, 1.0, "0 to 1 (1 is off)"),
        _limits("min_p", 0.0, 0.0, 1.0, "0 to 1 (0 is off)"),
        _limits("repetition_penalty", 1.0, 1e-3, 1e3, "0.001 to 1000 (1 is off)"),
        _limits("presence_penalty", 0.0, -1e3, 1e3, "-1000 to 1000 (0 is off)"),
        _limits("frequency_penalty", 0.0, -1e3, 1e3, "-1000 to 1000 (0 is off)"),
    )
)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, for a batch (numbers) or for each of its sequences ([B] tensors). None switches off.

    They work in this order, which is transformers'; draft and target get the same ones:

    Args:
        repetition_penalty: > 0. Logits of tokens that occur in prompt or output are divided by it where positive,
            multiplied where negative (Keskar et al., arXiv 1909.05858).
        presence_penalty, frequency_penalty: subtracted from the logits of tokens that were generated: once, and once
            for each time (as in OpenAI's interface). These three need a :class:`TokenTable`.
        temperature: 0 is greedy; otherwise finite and >= 0.001.
        top_k: keeps the k largest logits, k >= 1. 0 is off.
        top_p: keeps a token iff all larger ones together have less than this probability (Holtzman et al., arXiv
            1904.09751). 1 is off; 0 keeps the largest logit alone.
        min_p: keeps tokens of at least this fraction of the largest probability (Nguyen et al., arXiv 2407.01082).

    Every filter keeps the tokens with logits >= its cutoff, so ties at the cutoff are kept, all of them.

    Raises:
        ValueError: names the parameter, its value and what is allowed.
    """

    FILTERS: ClassVar = ("top_k", "top_p", "min_p")
    PENALTIES: ClassVar = ("repetition_penalty", "presence_penalty", "frequency_penalty")

    temperature: float | torch.Tensor = 1.0
    top_k: int | torch.Tensor | None = None
    top_p: float | torch.Tensor | None = None
    min_p: float | torch.Tensor | None = None
    repetition_penalty: float | torch.Tensor | None = None
    presence_penalty: float | torch.Tensor | None = None
    frequency_penalty: float | torch.Tensor | None = None

    def __post_init__(self) -> None:
        # Checked once here and not in every step: reading a tensor's values waits for its device.
        for name in _LIMITS:
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                _check_values(name, value)
            elif value is not None or name == "temperature":
                _check_value(name, value)

    @classmethod
    def unchecked(cls, **columns: torch.Tensor) -> SamplingParams:
        """Of tensors whose values were checked before: nothing is read, so nothing waits for their device."""
        params = object.__new__(cls)
        for field in dataclasses.fields(cls):
            object.__setattr__(params, field.name, columns.get(field.name))
        return params

    @staticmethod
    def neutral(name: str) -> float:
        """The value that switches a filter or a penalty off. (Nothing switches the temperature off.)"""
        return cast(float, _LIMITS[name][0])

    def uses(self, names: tuple[str, ...]) -> bool:
        """Whether any of these parameters may do something; a tensor always may."""
        values = [(getattr(self, name), _LIMITS[name][0]) for name in names]
        return any(v is not None and (isinstance(v, torch.Tensor) or v != neutral) for v, neutral in values)


def _check_value(name: str, value: object) -> None:
    off, low, high, allowed, integer = _LIMITS[name]
    fine = isinstance(value, int if integer else (int, float)) and not isinstance(value, bool)
    if not fine or not (low <= value <= high or value == (0 if off is None else off)):
        # Beyond float32 a number is infinite to the kernels.
        given = math.inf if fine and math.isfinite(value) and abs(value) > _LARGEST else value
        raise ValueError(f"{name}: got {given!r}, allowed: {allowed}")


def _check_values(name: str, values: torch.Tensor) -> None:
    off, low, high, allowed, integer = _LIMITS[name]
    right_dtype = values.dtype in (torch.int32, torch.int64) or values.is_floating_point() and not integer
    if values.dim() > 1 or not right_dtype:
        raise ValueError(
            f"{name}: got a {values.dtype} tensor of shape {list(values.shape)}, allowed: a number or [B]"
            + (" of integers" if integer else "")
        )
    # A NaN is not within the limits.
    bad = ~((values >= low) & (values <= high) | (values == (0 if off is None else off)))
    if bad.any():
        raise ValueError(f"{name}: got {values[bad].tolist()[0]}, allowed: {allowed}")


class TokenTable(NamedTuple):
    """What a sequence's distribution says of single tokens: the sparse lists after penalties, bias and bans.

    A row's logits become, before temperature and filters: + bias (-inf bans a token); the repetition penalty if the
    token is in prompt or output; - presence_penalty if it was generated; - frequency_penalty * how often; and -inf for
    tokens of ``ends`` before ``first_end``. The drafts of a step that come before a row count as generated there.
    """

    ids: torch.Tensor  # [B, N] int64, ascending in every row; padding (``PADDING``) at the end
    bias: torch.Tensor  # [B, N] float32
    in_prompt: torch.Tensor  # [B, N] bool
    count: torch.Tensor  # [B, N] int32: how often the token was generated
    ends: torch.Tensor | None = None  # [E] int64: tokens that may not come yet (end of sequence) ...
    first_end: torch.Tensor | None = None  # [B] int64: ... before this absolute position

    PADDING = 2**62  # in ``ids``, where there is no token


class DraftStep(NamedTuple):
    """What ``draft_step`` returns: the drawn tokens, and all that verification needs to know of q."""

    tokens: torch.Tensor  # [B] int64 (of the target's vocabulary); -1 where the row has no distribution (see status)
    log_q: torch.Tensor  # [B] float32, natural log of the drawn token's probability; 0 at temperature 0
    cutoff: torch.Tensor  # [B] float32, tokens with logits below it are filtered out; -inf without a filter, and greedy
    lse: torch.Tensor  # [B] float32, log sum exp(logit / T) of the kept tokens; at temperature 0 the largest logit
    status: torch.Tensor  # [B] int32, Status (the DRAFT_ flags)
    # Where compact=k' was asked: [B, k'] int64, ascending, then ``TokenTable.PADDING``.
    compact_ids: torch.Tensor | None = None
    compact_log_q: torch.Tensor | None = None  # [B, k'] float32; -inf for padding

    MAX_COMPACT = 1024  # the largest k'


class SpeculativeStep(NamedTuple):
    """What ``speculative_step`` returns."""

    tokens: torch.Tensor  # [B, K+1] int64: accepted drafts, then one recovered or bonus token, then -1
    num_accepted: torch.Tensor  # [B] int32
    status: torch.Tensor  # [B] int32, Status
    num_emitted: torch.Tensor  # [B] int32: num_accepted + 1, or num_accepted where the next row had no distribution
    log_probs: torch.Tensor | None = None  # [B, K+1] float32 if asked: log p of the emitted tokens; NaN after them
    raw_log_probs: torch.Tensor | None = None  # the same of softmax(raw logits): no penalty, temperature or filter
