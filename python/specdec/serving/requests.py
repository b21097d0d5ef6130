"""What a scheduler is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from specdec_kernels import SamplingParams, Status

from ..checks import read_as, read_count, refuse
from ..loop.batch import Entry
from ..loop.sequence import Ends, SequenceRecord
from ..models.cached_model import CachedModel
from ..prompts import read_eos, read_prompts, read_seeds
from ..result import End, Producer, error_text
from ..sampling.params import of_each, read_bias, read_min_new_tokens, read_params
from ..sampling.processors import read_processors
from ..stats import Stats
from ..stopping import Stopping

if TYPE_CHECKING:
    from transformers import LogitsProcessor

MAX_EOS = 8  # end-of-sequence tokens of one request


@dataclass(frozen=True)
class Request:
    """One sequence. All that ``SpeculativeDecoder.generate`` takes for a sequence, with the same meaning.

    Args:
        prompt: >= 1 token ids.
        params: numbers, no tensors; None: greedy.
        seed: a signed 64-bit integer. The text depends on it, the prompt and the settings: not on when, where or beside
            whom it is decoded.
        eos_token_id: an id, up to 8, or [] for none; None asks the target's configuration.
        stop: shared by no other request, unless it keeps no state.
        id: the caller's own; handed back.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    params: SamplingParams | None = None
    seed: int = 0
    eos_token_id: int | Sequence[int] | None = None
    stop: Stopping | None = None
    logit_bias: Mapping[int, float] | None = None
    banned_tokens: Sequence[int] = ()
    min_new_tokens: int = 0
    logits_processor: Sequence[LogitsProcessor] | None = None
    id: object = None


@dataclass(frozen=True)
class Outcome:
    """How a request ended."""

    number: int  # as ``submit`` returned it; -1: it was refused
    request: Request
    tokens: list[int]  # all that was emitted, an end-of-sequence token included
    produced_by: list[Producer]
    end: End
    status: Status  # Status.OK, or what went wrong with the sequence's logits
    stats: Stats  # counts; no seconds, which sequences share
    error: str | None = None  # with End.FAILED, unless ``status`` says why: "ValueError: prompt: got ..."
    drafter_error: str | None = None  # why its drafter proposed no more for it; the text does not suffer

    @classmethod
    def of(cls, number: int, request: Request, record: SequenceRecord) -> Outcome:
        return cls(
            number,
            request,
            record.tokens,
            record.produced_by,
            record.end,
            record.status,
            record.stats,
            None if record.error is None else error_text(record.error),
            record.drafter_error,
        )

    @classmethod
    def refused(cls, request: Request, error: Exception) -> Outcome:
        return cls(-1, request, [], [], End.FAILED, Status.OK, Stats.empty(0), error_text(error))


class Limits(NamedTuple):
    """What a request must fit."""

    max_length: int  # tokens of prompt and output
    most_drafts: int
    eos: frozenset[int]  # the tokens that ``min_new_tokens`` can hold back


def read_request(request: Request, number: int, target: CachedModel, limits: Limits) -> Entry:
    """
    Raises:
        ValueError: names the field, what was given and what is allowed.
    """
    if not isinstance(request, Request):
        refuse("request", type(request).__name__, "a Request")
    cpu, size = torch.device("cpu"), target.vocab_size
    if not isinstance(request.prompt, (Sequence, torch.Tensor)):
        refuse("prompt", type(request.prompt).__name__, "a list of token ids")
    (prompt,) = read_as("prompt", read_prompts, [request.prompt], None, size)
    read_count("max_new_tokens", request.max_new_tokens)
    if len(prompt) + request.max_new_tokens > limits.max_length:
        given = f"{len(prompt)} tokens with max_new_tokens={request.max_new_tokens}"
        refuse("prompt", given, f"{limits.max_length} tokens together")
    params = request.params
    if isinstance(params, SamplingParams) and any(isinstance(v, torch.Tensor) for v in vars(params).values()):
        refuse("params", "tensors", "numbers: a request is one sequence")
    eos = read_eos(request.eos_token_id, target.model)
    if len(eos) > MAX_EOS:
        refuse("eos_token_id", f"{len(eos)} ids", f"up to {MAX_EOS}")
    (shortest,) = read_min_new_tokens(request.min_new_tokens, 1, request.max_new_tokens)
    if shortest and eos != limits.eos:
        refuse("min_new_tokens", f"{shortest} with eos_token_id={sorted(eos)}", f"0, or {sorted(limits.eos)}")
    banned = list(request.banned_tokens) if isinstance(request.banned_tokens, Sequence) else request.banned_tokens
    if request.stop is not None and not callable(getattr(request.stop, "first_end", None)):
        refuse("stop", type(request.stop).__name__, "a Stopping, such as StopStrings")
    possible = frozenset(i for i in eos if 0 <= i < size)
    ends = Ends(request.max_new_tokens, possible, request.stop)
    record = SequenceRecord(number, prompt, prompt, Stats.empty(limits.most_drafts), len(prompt), ends)
    return Entry(
        record,
        of_each(read_params(params, 1, cpu), 1)[0],
        int(read_seeds(request.seed, 1, cpu)[0]),
        read_bias(request.logit_bias, banned, 1, size)[0],
        shortest,
        read_processors(request.logits_processor, 1)[0],
    )
