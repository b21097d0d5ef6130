"""What ``generate`` returns, and the words for where tokens came from and why texts ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specdec_kernels import Status

from .stats import Stats


class Producer(enum.StrEnum):
    """Where an emitted token came from."""

    ACCEPTED = "accepted"  # drafted, and accepted by verification
    RECOVERED = "recovered"  # drawn from the residual at the first rejection
    BONUS = "bonus"  # drawn from the target after all drafts were accepted, or where nothing was drafted


def error_text(error: BaseException) -> str:
    """Returns the text by which results report an error."""
    return f"{type(error).__name__}: {error}"


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    EOS = "eos"  # it emitted an end-of-sequence token
    STOP = "stop"  # its ``stop`` ended it, for example at a stop string
    LENGTH = "length"  # it has ``max_new_tokens`` new tokens
    CANCELLED = "cancelled"
    FAILED = "failed"  # its logits define no distribution (see ``status``), or there was an exception (see ``errors``)


class TokenLogProb(NamedTuple):
    """A token among all that its position could have had, under the softmax of the model's own logits."""

    log_prob: float
    rank: int  # from 1, the most likely token; of equally likely ones, the lowest id comes first
    top: list[tuple[int, float]]  # the most likely tokens and their log-probabilities, in this order; none with -inf


@dataclass(frozen=True)
class GenerationResult:
    """What ``generate`` returns for B sequences. Lists have one entry for each of them.

    Example:
        >>> from specdec import SpeculativeDecoder, load_embedded_pair
        >>> target, draft, tokenizer = load_embedded_pair()
        >>> result = SpeculativeDecoder(target, draft).generate([tokenizer("import os").input_ids], max_new_tokens=8)
        >>> result.sequences.shape[1] == len(tokenizer("import os").input_ids) + 8
        True
        >>> len(result.tokens[0]), len(result.produced_by[0]), str(result.finish_reason[0])
        (8, 8, 'length')
    """

    sequences: torch.Tensor  # [B, prompt + new] int64: the prompt as given, the new tokens, then padding
    tokens: list[list[int]]  # the new tokens of each sequence, an end-of-sequence token included
    produced_by: list[list[Producer]]
    status: list[Status]  # Status.OK, or what went wrong with the sequence's logits
    finish_reason: list[FinishReason]
    errors: list[str | None]  # what ended it, where its own grammar failed; other exceptions are raised
    stats: Stats  # the whole batch
    sequence_stats: list[Stats]
    # Of ``tokens``, under the distribution that they were drawn from; None: not requested.
    log_probs: list[list[float]] | None = None
    raw_log_probs: list[list[float]] | None = None  # of ``tokens``, under the softmax of the model's own logits
    top_log_probs: list[list[TokenLogProb]] | None = None  # of ``tokens``
    # Of each prompt's own tokens, padding left out; None for the first token, which nothing predicts.
    prompt_log_probs: list[list[TokenLogProb | None]] | None = None
    logits: list[torch.Tensor] | None = None  # [new, V] for each sequence: the model's own logits at each new token
    drafter_error: str | None = None  # why the drafter was dropped; None: it was not dropped
    step_costs: list[float] | None = None  # with AdaptiveDrafts: the T(0), T(1), ... by which K was chosen
