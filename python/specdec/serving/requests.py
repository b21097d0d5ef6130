"""Requests to a scheduler, their checks, and their outcomes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from specdec_kernels import SamplingParams, Status

from ..checks import read_as, read_count, refuse
from ..loop.arguments import read_entries
from ..loop.sequence import DraftSettings, Entry, SequenceRecord
from ..loop.token_log_probs import read_asked
from ..models.cached_model import CachedModel
from ..prompts import read_eos, read_prompts
from ..result import End, Producer, TokenLogProb, error_text
from ..stats import Stats
from ..stopping import Stopping

if TYPE_CHECKING:
    from transformers import LogitsProcessor

MAX_EOS = 8  # the most end-of-sequence tokens of one request


@dataclass(frozen=True)
class Request:
    """A request to decode one sequence. Its fields mean the same as the arguments of ``SpeculativeDecoder.generate``.

    Args:
        prompt: at least one token id.
        params: with numbers, not tensors; None: greedy.
        seed: a signed 64-bit integer. The text depends on seed, prompt and settings, but not on the time, the row or
            the other requests of the batch.
        eos_token_id: one id, up to 8 ids (or as many as the target's configuration has), or [] for none; None takes
            those of the target's configuration.
        stop: must not be shared with other requests, unless it keeps no state.
        id: any object of the caller's; the outcome returns it with the request.
        num_drafts: the most tokens that a step drafts for this request, from 0 (it is decoded plainly) to the
            scheduler's largest K; with a tree, the most nodes of its paths. None: that K. Greedy texts and those of
            ``coupled`` do not depend on it. Sampled texts of ``token`` and ``block`` are other draws from the same
            distribution.
        prediction: at least one and at most ``max_length`` token ids that the output is likely to have (OpenAI's
            Predicted Outputs). Drafts are taken from there, in the place of the drafter's, while the output is in it.
            It changes a text as little as other drafts do. Not with trees; with K = 0 nothing is drafted.
        owner: whose earlier texts may serve this request, and whom this one may serve later: the memory of a
            ``SuffixDrafter`` with ``SuffixMemories``. Any hashable value; None: nobody's, and no memory is used.
        report_drafts: whether each ``Emission`` says what its step drafted for this request. Not of trees.
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
    log_probs: bool = False
    top_log_probs: int | None = None
    prompt_log_probs: int | None = None
    num_drafts: int | None = None
    report_drafts: bool = False
    prediction: Sequence[int] | None = None
    owner: Hashable = None


@dataclass(frozen=True)
class Outcome:
    """How a request ended."""

    number: int  # as returned by ``submit``; -1: the request was refused
    request: Request
    tokens: list[int]  # all emitted tokens, an end-of-sequence token included
    produced_by: list[Producer]
    end: End
    status: Status  # Status.OK, or what went wrong with the sequence's logits
    stats: Stats  # counts, without seconds, which sequences share
    error: str | None = None  # with End.FAILED, unless ``status`` says why: "ValueError: prompt: got ..."
    drafter_error: str | None = None  # why its drafter stopped drafting for it; the text is still right
    # As in ``GenerationResult``, of this sequence; None: not requested.
    log_probs: list[float] | None = None
    raw_log_probs: list[float] | None = None
    top_log_probs: list[TokenLogProb] | None = None
    prompt_log_probs: list[TokenLogProb | None] | None = None  # as far as the prompt was read

    @classmethod
    def of(cls, number: int, request: Request, record: SequenceRecord) -> Outcome:
        assert record.end is not None
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
            record.log_probs if record.asked.emitted else None,
            record.raw_log_probs if record.asked.emitted else None,
            record.top_log_probs if record.asked.top is not None else None,
            record.prompt_log_probs,
        )

    @classmethod
    def refused(cls, request: Request, error: Exception) -> Outcome:
        return cls(-1, request, [], [], End.FAILED, Status.OK, Stats.empty(0), error_text(error))


class Limits(NamedTuple):
    """The limits that a request is checked against."""

    max_length: int  # the most tokens of prompt and output
    most_drafts: int
    max_eos: int  # the most end-of-sequence tokens
    nodes: int  # of a tree of drafts; 0: chains


def read_request(request: Request, number: int, target: CachedModel, limits: Limits) -> Entry:
    """Checks a request and returns its entry, with ``number`` as the number of its sequence.

    Raises:
        ValueError: names the field, what was given and what is allowed.
    """
    if not isinstance(request, Request):
        refuse("request", type(request).__name__, "a Request")
    prompts = [_read_ids("prompt", request.prompt, target)]
    read_count("max_new_tokens", request.max_new_tokens)
    if len(prompts[0]) + request.max_new_tokens > limits.max_length:
        given = f"{len(prompts[0])} tokens with max_new_tokens={request.max_new_tokens}"
        refuse("prompt", given, f"{limits.max_length} tokens together")
    params = request.params
    if isinstance(params, SamplingParams) and any(isinstance(v, torch.Tensor) for v in vars(params).values()):
        refuse("params", "tensors", "numbers: a request is one sequence")
    eos = read_eos(request.eos_token_id, target.model)
    if len(eos) > limits.max_eos:
        refuse("eos_token_id", f"{len(eos)} ids", f"up to {limits.max_eos}")
    banned = list(request.banned_tokens) if isinstance(request.banned_tokens, Sequence) else request.banned_tokens
    (entry,) = read_entries(
        target,
        prompts,
        request.max_new_tokens,
        params,
        request.seed,
        eos,
        request.stop,
        logit_bias=request.logit_bias,
        banned_tokens=banned,
        min_new_tokens=request.min_new_tokens,
        logits_processor=request.logits_processor,
        most_drafts=limits.most_drafts,
        asked=read_asked(request.log_probs, request.top_log_probs, request.prompt_log_probs),
        drafting=_read_drafting(request, target, limits),
    )
    entry.record.number = number
    return entry


def _read_ids(name: str, ids: object, target: CachedModel) -> list[int]:
    if not isinstance(ids, (Sequence, torch.Tensor)):
        refuse(name, type(ids).__name__, "a list of token ids")
    return read_as(name, read_prompts, [ids], None, target.vocab_size)[0]


def _read_drafting(request: Request, target: CachedModel, limits: Limits) -> DraftSettings:
    most = request.num_drafts
    if most is not None and read_count("num_drafts", most) > limits.most_drafts:
        refuse("num_drafts", most, f"None, or 0 to {limits.most_drafts}")
    if not isinstance(request.report_drafts, bool):
        refuse("report_drafts", repr(request.report_drafts), "True or False")
    prediction = [] if request.prediction is None else _read_ids("prediction", request.prediction, target)
    if prediction and limits.nodes:
        refuse("prediction", f"{len(prediction)} tokens with a tree of drafts", "None, or a decoder without a tree")
    if len(prediction) > limits.max_length:
        refuse("prediction", f"{len(prediction)} tokens", f"up to {limits.max_length}")
    try:
        hash(request.owner)
    except TypeError:
        refuse("owner", f"a {type(request.owner).__name__}", "None, or a hashable value")
    return DraftSettings(most, request.report_drafts, prediction, request.owner)
