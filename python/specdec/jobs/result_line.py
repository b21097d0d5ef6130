"""The object that stands for one text: a line of a job's output, and of ``specdec generate --json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from ..detokenize import continuation
from ..loop.sequence import SequenceState
from ..result import FinishReason, TokenLogProb
from ..stopping import cut_after
from .lines import JobLine

KEYS = ("id", "prompt", "text", "token_ids", "produced_by", "finish_reason", "status", "stats")  # in this order
LOG_PROB_KEYS = ("log_probs", "raw_log_probs", "top_log_probs", "prompt_log_probs")
OPTIONAL_KEYS = (*LOG_PROB_KEYS, "error")  # after them, in this order: what was asked for, and a failed line's error
ERROR = "ERROR"  # the status of a text that an exception ended, which ``error`` names
_LEAST = -9999.0  # of a probability of 0, as in OpenAI's interface: JSON has no infinity


def result_line(
    line: JobLine, decoded: SequenceState, stats: Mapping[str, object], tokenizer: PreTrainedTokenizerBase
) -> dict[str, object]:
    """
    Args:
        decoded: the line's text.
        stats: its counts, by name.

    Returns:
        KEYS and those of OPTIONAL_KEYS that apply, with their values, as JSON has them. ``prompt`` is the prompt's
        place in its file.
    """
    tokens = decoded.tokens
    text = continuation(tokenizer, decoded.request.prompt, tokens) if tokens else ""
    reason = decoded.finish_reason or FinishReason.LENGTH  # where no token was wanted
    row: dict[str, object] = {
        "id": line.id,
        "prompt": line.index,
        "text": cut_after(text, line.settings.stop, line.prompt),
        "token_ids": tokens,
        "produced_by": [str(producer) for producer in decoded.produced_by],
        "finish_reason": str(reason),
        "status": decoded.status.name if decoded.exception is None else ERROR,
        "stats": dict(stats),
        **log_prob_fields(decoded),
    }
    if reason == FinishReason.FAILED:
        row["error"] = decoded.error or f"the target's logits have no distribution: {decoded.status.name}"
    return row


def log_prob_fields(decoded: SequenceState) -> dict[str, object]:
    """The fields of ``LOG_PROB_KEYS`` that were asked for, in this order."""
    found: dict[str, object] = {}
    for key in LOG_PROB_KEYS:
        values: Sequence[float | TokenLogProb | None] | None = getattr(decoded, key)
        if values is not None:
            found[key] = [_json(value) for value in values]
    return found


def _json(value: float | TokenLogProb | None) -> object:
    if isinstance(value, TokenLogProb):
        top = [[token, _number(each)] for token, each in value.top]
        return {"log_prob": _number(value.log_prob), "rank": value.rank, "top": top}
    return None if value is None else _number(value)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else max(value, _LEAST)
