"""The public types: sampling parameters, results, status flags.

p is the target model's distribution, q the draft's, both after penalties, temperature and filters; a batch has B
sequences, a step K drafts, a vocabulary V tokens.
"""

from __future__ import annotations

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

    ``token``: tests one draft after another (Leviathan et al. 2023, Algorithm 1 = Chen et al. 2023, Algorithm 2).
    ``block``: tests the drafts of a step jointly, and accepts at least as many in expectation (Sun et al., ICLR 2025,
    Algorithm 2).
    ``coupled``: draft and target race with the same noise, which is keyed by the absolute position (Daliri et al.
    2024). It needs no q, and its text is, token for token, that of plain sampling with the same seed.
    """

    TOKEN = "token"
    BLOCK = "block"
    COUPLED = "coupled"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        allowed = ", ".join(repr(str(rule)) for rule in cls)
        if isinstance(value, str) and value.lower() in ("google", "deepmind"):
            allowed += " ('token' is Google's and DeepMind's, which are the same)"
        raise ValueError(f"rule: got {value!r}, allowed: {allowed}")


class TreeRule(enum.StrEnum):
    """How the nodes of a tree are accepted. The emitted text has the target's distribution under all three.

    ``walk``: draws a token from the target at a node and goes on to the child that holds it. For deterministic children
    (the most likely tokens, n-grams), of which no rule accepts more. The noise is that of ``coupled``, so the text is,
    token for token, that of plain sampling with the same seed.
    ``token``: tests the children of a node one after another (SpecInfer, arXiv 2305.09781; Sequoia, arXiv 2402.12374).
    For children that were sampled without replacement. On a chain it is ``Rule.TOKEN``.
    ``block``: tests paths jointly, from the leaves to the root (Traversal verification, arXiv 2505.12398). For the same
    children. On a chain it is ``Rule.BLOCK``.
    """

    WALK = "walk"
    TOKEN = "token"
    BLOCK = "block"

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
    TARGET_EMPTY = 4  # the whole row is -inf, or its allowed tokens are: the row allows none, perhaps
    DRAFT_NAN = 8
    DRAFT_POSITIVE_INFINITY = 16
    DRAFT_EMPTY = 32
    DRAFT_ZERO_PROBABILITY = 64  # q(x) = 0 for the proposed x: rejected, recovered from max(0, p - q)
    DRAFT_OUT_OF_RANGE = 128  # a draft token >= V or < -1 (-1 is the padding of a short draft, and is fine)

    # The flags of a target row, as an int: any of them ends the sequence.
    TARGET_FAULTS = enum.nonmember(TARGET_NAN | TARGET_POSITIVE_INFINITY | TARGET_EMPTY)


# float32 resolves l / T - lse to about |l / T| * 6e-8; below this temperature that is no longer a distribution.
MIN_TEMPERATURE = 1e-3
# Above some 8e37, 1 / T is a denormal number, which many devices take for 0: masked logits, -inf, times 0 are NaN.
MAX_TEMPERATURE = 1e30


class _Limits(NamedTuple):
    neutral: float | None  # switches the parameter off; None: nothing does
    low: float
    high: float
    allowed: str  # the same in words
    integer: bool = False

    def accepts_outside(self) -> float:
        """The one value that is allowed outside of low .. high."""
        return 0 if self.neutral is None else self.neutral


_LARGEST = torch.finfo(torch.float32).max
_LIMITS = {
    "temperature": _Limits(None, MIN_TEMPERATURE, MAX_TEMPERATURE, "0 (greedy), or 0.001 to 1e+30"),
    "top_k": _Limits(0, 1, 2**24, "an integer >= 1, or 0 (off)", integer=True),
    "top_p": _Limits(1.0, 0.0, 1.0, "0 to 1 (1 is off)"),
    "min_p": _Limits(0.0, 0.0, 1.0, "0 to 1 (0 is off)"),
    "repetition_penalty": _Limits(1.0, 1e-3, 1e3, "0.001 to 1000 (1 is off)"),
    "presence_penalty": _Limits(0.0, -1e3, 1e3, "-1000 to 1000 (0 is off)"),
    "frequency_penalty": _Limits(0.0, -1e3, 1e3, "-1000 to 1000 (0 is off)"),
}


TABLE_PADDING = 2**62  # in TokenTable.ids, where there is no token
MAX_WIDTH = 1024  # the most children of one node that ``draft_children`` draws


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters: a number holds for the whole batch, a [B] tensor for each of its sequences. None means off.

    They are applied in this order, which is transformers', to target and draft alike:

    Args:
        repetition_penalty: 0.001 to 1000. A token that occurs in the prompt or the output has its logit divided by this
            where the logit is positive, and multiplied where it is negative (Keskar et al., arXiv 1909.05858).
        presence_penalty: -1000 to 1000. Subtracted from the logit of every token that was generated.
        frequency_penalty: -1000 to 1000. Subtracted once for each time that the token was generated. Both are defined
            as in OpenAI's interface. All three penalties need a :class:`TokenTable`.
        temperature: 0 is greedy; otherwise 0.001 to 1e+30.
        top_k: keeps the k largest logits, k >= 1. 0 is off.
        top_p: 0 to 1. Keeps a token iff all more likely ones together have less than this probability (Holtzman et al.,
            arXiv 1904.09751). 1 is off; 0 keeps the largest logit alone.
        min_p: 0 to 1. Keeps the tokens that have at least this fraction of the largest probability (Nguyen et al.,
            arXiv 2407.01082). 0 is off.

    Every filter keeps the tokens whose logit is at least its cutoff, so all ties at the cutoff are kept.

    Raises:
        ValueError: names the parameter, its value and what is allowed.

    Example:
        >>> import torch
        >>> from specdec_kernels import SamplingParams
        >>> SamplingParams(temperature=torch.tensor([0.0, 0.8]), top_p=0.95).top_p  # two sequences, the first is greedy
        0.95
        >>> SamplingParams(top_p=1.5)
        Traceback (most recent call last):
        ValueError: top_p: got 1.5, allowed: 0 to 1 (1 is off)
    """

    FILTERS: ClassVar = ("top_k", "top_p", "min_p")
    PENALTIES: ClassVar = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    TABLE_PADDING: ClassVar = TABLE_PADDING

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

    @staticmethod
    def neutral(name: str) -> float:
        """The value that switches a filter or a penalty off. (Nothing switches the temperature off.)"""
        return cast(float, _LIMITS[name].neutral)

    def uses(self, names: tuple[str, ...]) -> bool:
        """Whether any of these parameters is on. A tensor counts as on, since its values are not read."""
        values = [(getattr(self, name), _LIMITS[name].neutral) for name in names]
        return any(v is not None and (isinstance(v, torch.Tensor) or v != neutral) for v, neutral in values)


def _check_value(name: str, value: object) -> None:
    limits = _LIMITS[name]
    right_type = isinstance(value, int if limits.integer else (int, float)) and not isinstance(value, bool)
    if right_type and isinstance(value, int | float):
        if limits.low <= value <= limits.high or value == limits.accepts_outside():
            return
        if abs(value) > _LARGEST:
            value = math.inf if value > 0 else -math.inf  # which is what the kernels, in float32, would see
    raise ValueError(f"{name}: got {value!r}, allowed: {limits.allowed}")


def _check_values(name: str, values: torch.Tensor) -> None:
    limits = _LIMITS[name]
    if values.is_meta or values.layout != torch.strided or values.is_nested or values.is_neg():
        form = "meta" if values.is_meta else str(values.layout).removeprefix("torch.")
        raise ValueError(f"{name}: got a tensor of {form} or a lazy view, allowed: numbers in memory (resolve_neg())")
    right_dtype = values.dtype in (torch.int32, torch.int64) or values.is_floating_point() and not limits.integer
    if values.dim() > 1 or not right_dtype:
        raise ValueError(
            f"{name}: got a {values.dtype} tensor of shape {list(values.shape)}, allowed: a number or [B]"
            + (" of integers" if limits.integer else "")
        )
    # A NaN passes none of these comparisons, so it is refused.
    bad = ~((values >= limits.low) & (values <= limits.high) | (values == limits.accepts_outside()))
    if bad.any():
        raise ValueError(f"{name}: got {values[bad].tolist()[0]}, allowed: {limits.allowed}")


class TokenTable(NamedTuple):
    """What penalties, bias and bans need to know of single tokens: a sparse list for each sequence.

    Before temperature and filters, each logit is adjusted in this order: its bias is added (-inf bans the token); the
    repetition penalty is applied if the token is in the prompt or the output; the presence penalty is subtracted if
    the token was generated, and the frequency penalty once for each time; its ``ends`` get -inf at positions before
    ``first_end``. The drafts of a step that come before a row count as generated in that row.
    """

    ids: torch.Tensor  # [B, N] int64, ascending in every row; padding (``TABLE_PADDING``) at the end
    bias: torch.Tensor  # [B, N] float32
    in_prompt: torch.Tensor  # [B, N] bool
    count: torch.Tensor  # type: ignore[assignment]  # [B, N] int32: how often the token was generated; hides tuple.count
    ends: torch.Tensor | None = None  # [B, E] int64, padding -1: its end-of-sequence tokens, which are banned ...
    first_end: torch.Tensor | None = None  # [B] int64: ... before this absolute position


class DraftStep(NamedTuple):
    """What ``draft_step`` returns: the drawn tokens, and all that verification needs to know of q."""

    tokens: torch.Tensor  # [B] int64 ids of the target's vocabulary; -1 where the row has no distribution (see status)
    log_q: torch.Tensor  # [B] float32: natural log of the drawn token's probability; 0 at temperature 0
    cutoff: torch.Tensor  # [B] float32: logits below it are filtered out; -inf without filters and at temperature 0
    lse: torch.Tensor  # [B] float32: log sum exp(logit / T) of the kept tokens; at temperature 0 the largest logit
    status: torch.Tensor  # [B] int32, Status (the DRAFT_ flags)


class SpeculativeStep(NamedTuple):
    """What ``speculative_step`` returns."""

    tokens: torch.Tensor  # [B, K+1] int64: accepted drafts, then one recovered or bonus token, then -1
    num_accepted: torch.Tensor  # [B] int32
    status: torch.Tensor  # [B] int32, Status
    num_emitted: torch.Tensor  # [B] int32: num_accepted + 1, or num_accepted where the next row had no distribution
    # With log_probs=True, else None:
    log_probs: torch.Tensor | None = None  # [B, K+1] float32: log p of the emitted tokens; NaN in unused slots
    raw_log_probs: torch.Tensor | None = None  # the same under softmax(raw logits): no penalty, temperature or filter


class DraftChildren(NamedTuple):
    """What ``draft_children`` returns: children of one node of every sequence, and what they were drawn from."""

    tokens: torch.Tensor  # [B, width] int64 ids of the target's vocabulary, in order; -1 where q has no more
    log_q: torch.Tensor  # [B, width] float32: natural logs of their probabilities under q; -inf where there is none
    cutoff: torch.Tensor  # [B] float32, as in DraftStep
    lse: torch.Tensor  # [B] float32, as in DraftStep
    status: torch.Tensor  # [B] int32, Status (the DRAFT_ flags)


class TreeStep(NamedTuple):
    """What ``verify_tree`` returns."""

    path: torch.Tensor  # [B, D+1] int64: the accepted nodes from the root down, then -1
    tokens: torch.Tensor  # [B, D+1] int64: their tokens, then one recovered or bonus token, then -1
    num_accepted: torch.Tensor  # [B] int32
    num_emitted: torch.Tensor  # [B] int32: num_accepted + 1, or num_accepted where the next row had no distribution
    status: torch.Tensor  # [B] int32, Status: the faults that were met on the path
