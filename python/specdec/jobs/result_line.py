"""The object that stands for one text: a line of a job's output, and of ``specdec generate --json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..detokenize import continuation
from ..result import FinishReason, Producer
from ..stopping import cut_after
from .lines import JobLine
from .log_probs import LOG_PROB_KEYS, HasLogProbs, log_prob_fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdec_kernels import Status

KEYS = ("id", "prompt", "text", "token_ids", "produced_by", "finish_reason", "status", "stats")  # in this order
OPTIONAL_KEYS = (*LOG_PROB_KEYS, "error")  # after them, in this order: what was asked for, and a failed line's error


def result_line(
    line: JobLine,
    prompt: Sequence[int],
    tokens: Sequence[int],
    produced_by: Sequence[Producer],
    finish_reason: FinishReason,
    status: Status,
    stats: Mapping[str, object],
    tokenizer: PreTrainedTokenizerBase,
    scores: HasLogProbs,
    error: str | None = None,
) -> dict:
    """
    Args:
        prompt: the ids of the line's prompt.
        tokens: those that were generated, as ``produced_by``, ``finish_reason`` and ``status`` say of them.
        stats: counts, by name.
        scores: the text with its log-probabilities.
        error: why it failed; None: the status says it.

    Returns:
        KEYS and those of OPTIONAL_KEYS that apply, with their values, as JSON has them. ``prompt`` is the prompt's
        place in its file.
    """
    text = continuation(tokenizer, prompt, tokens) if tokens else ""
    row: dict[str, object] = {
        "id": line.id,
        "prompt": line.index,
        "text": cut_after(text, line.settings.stop, line.prompt),
        "token_ids": list(tokens),
        "produced_by": [str(producer) for producer in produced_by],
        "finish_reason": str(finish_reason),
        "status": status.name,
        "stats": dict(stats),
        **log_prob_fields(scores),
    }
    if finish_reason == FinishReason.FAILED:
        row["error"] = error or f"the target's logits have no distribution: {status.name}"
    return row
