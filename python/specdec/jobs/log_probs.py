"""Log-probabilities as fields of a JSON object, which a JSON parser of any language reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from ..result import TokenLogProb

LOG_PROB_KEYS = ("log_probs", "raw_log_probs", "top_log_probs", "prompt_log_probs")
_LEAST = -9999.0  # of a probability of 0, as in OpenAI's interface: JSON has no infinity


class HasLogProbs(Protocol):
    """A text with the log-probabilities that were asked for; None: not asked for."""

    @property
    def log_probs(self) -> list[float] | None: ...
    @property
    def raw_log_probs(self) -> list[float] | None: ...
    @property
    def top_log_probs(self) -> list[TokenLogProb] | None: ...
    @property
    def prompt_log_probs(self) -> list[TokenLogProb | None] | None: ...


def log_prob_fields(text: HasLogProbs) -> dict[str, object]:
    """The fields of ``LOG_PROB_KEYS`` that were asked for, in this order."""
    fields = {
        "log_probs": _numbers(text.log_probs),
        "raw_log_probs": _numbers(text.raw_log_probs),
        "top_log_probs": _tokens(text.top_log_probs),
        "prompt_log_probs": _tokens(text.prompt_log_probs),
    }
    return {key: value for key, value in fields.items() if value is not None}


def _numbers(values: list[float] | None) -> list[float | None] | None:
    return None if values is None else [_number(value) for value in values]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else max(value, _LEAST)


def _tokens(values: Sequence[TokenLogProb | None] | None) -> list[dict[str, object] | None] | None:
    if values is None:
        return None
    return [
        None
        if each is None
        else {
            "log_prob": _number(each.log_prob),
            "rank": each.rank,
            "top": [[token, _number(value)] for token, value in each.top],
        }
        for each in values
    ]
