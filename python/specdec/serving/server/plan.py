"""What is to be decoded for a request of a client."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec_kernels import SamplingParams

from ...generate import next_seed
from ...loop.request import Request
from .answer_reader import AnswerReader
from .errors import ApiError, refused
from .lanes import Lane
from .messages import joined
from .request_bodies import MAX_CHOICES, ChatRequest, CompletionRequest, GenerationBody
from .service import Service
from .stop_cut import StopCut, TextStop
from .tools import Reading, read_chat

_LONG = 20_000  # characters; longer texts are tokenized in another thread
_COMPLETION_TOKENS = 16  # where the request does not say, as in OpenAI's interface
# Names of the engine's requests -> what clients call them.
_FIELDS = {
    "max_new_tokens": "max_tokens",
    "eos_token_id": "stop_token_ids",
    "top_log_probs": "logprobs",
    "prompt_log_probs": "prompt_logprobs",
    "grammar": "response_format",
}


class Prompt(NamedTuple):
    tokens: list[int]
    text: str | None  # as it was given; None: as ids


class EndpointRequest(NamedTuple):
    """What the two endpoints say each in its own way.

    Attributes:
        field: the name of the prompts' field.
        max_tokens: None: ``default_tokens``, or as many as fit, if these are fewer or None.
        top, prompt_top: how many likely tokens to tell of each token of the text and of the prompt; None: nothing.
        reading: how the texts are read.
    """

    prompts: list[Prompt]
    field: str
    max_tokens: int | None
    default_tokens: int | None
    top: int | None
    prompt_top: int | None
    reading: Reading


@dataclass(frozen=True)
class Plan:
    """A request of a client, checked as far as the engine does not check it.

    Args:
        lane: decodes all of it.
        requests: of each choice, all those of the first prompt first.
        cuts: of each choice.
        field: the name of the prompt's field.
        reading: how the texts are read.
    """

    lane: Lane
    prompts: list[Prompt]
    requests: list[Request]
    cuts: list[StopCut]
    field: str
    reading: Reading

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)

    @property
    def copies(self) -> int:
        """The choices of each prompt."""
        return len(self.requests) // len(self.prompts)

    def renamed(self, error: ApiError) -> ApiError:
        """An error about a field of a ``Request``, with the client's name for it."""
        name = error.param or ""
        told = self.field if name == "prompt" else _FIELDS.get(name, name)
        if name == "grammar" and self.reading.calls is not None:
            told = "tools"
        return error.about(told)


async def plan_completion(service: Service, body: CompletionRequest, owner: Hashable) -> Plan:
    """Raises ApiError."""
    _check(service, body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise refused("best_of", f"got {body.best_of}, allowed: n, which is {body.n or 1}")
    if body.stream and body.echo and body.logprobs is not None:
        raise refused("echo", "not together with stream and logprobs")
    if body.max_tokens == 0 and not body.echo:
        raise refused("max_tokens", "got 0, allowed without echo: 1 or more")
    given = _given(service, body)
    ids = await _tokens(service, given, body.add_special_tokens is not False)
    if not all(ids):
        raise refused("prompt", "got an empty one, allowed: at least one token")
    prompts = [Prompt(i, each if isinstance(each, str) else None) for i, each in zip(ids, given, strict=True)]
    top = body.logprobs
    scored = top if body.echo else None
    if body.prompt_logprobs is not None:
        scored = max(scored or 0, body.prompt_logprobs)
    reading = Reading(service.detokenizer, AnswerReader)
    asked = EndpointRequest(prompts, "prompt", body.max_tokens, _COMPLETION_TOKENS, top, scored, reading)
    return await _plan(service, body, asked, owner)


async def plan_chat(service: Service, body: ChatRequest, owner: Hashable) -> Plan:
    """Raises ApiError."""
    _check(service, body)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise refused("max_tokens", "not together with max_completion_tokens")
    if body.max_tokens == 0:
        raise refused("max_tokens", "got 0, allowed: 1 or more")
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs", "allowed only with logprobs: true")
    if not service.tokenizer.chat_template:
        raise refused("messages", f"the tokenizer of {service.name} has no chat template; use /v1/completions")

    try:
        tokens, reading = await asyncio.to_thread(read_chat, service, body)
    except ValueError as error:
        raise ApiError.invalid(error) from error
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    top = (body.top_logprobs or 0) if body.logprobs else None
    asked = EndpointRequest([Prompt(tokens, None)], "messages", most, None, top, body.prompt_logprobs, reading)
    return await _plan(service, body, asked, owner)


def _check(service: Service, body: GenerationBody) -> None:
    if body.model and body.model != service.name:
        message = f"The model {body.model[:60]!r} does not exist here; {service.name!r} does."
        raise ApiError(404, message, "model_not_found", "model")
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "allowed only with stream: true")
    if body.stream and body.prompt_logprobs is not None:
        raise refused("prompt_logprobs", "not together with stream")


def _given(service: Service, body: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a request."""
    given = body.prompt
    if given is None:  # the beginning of a document
        first = service.tokenizer.bos_token_id
        if first is None:
            raise refused("prompt", "got null, allowed for this model: a text, as it has no token for a beginning")
        return [[first]]
    if isinstance(given, str) or given and isinstance(given[0], int):
        return [given]
    if not 0 < len(given) * (body.n or 1) <= MAX_CHOICES:
        raise refused("prompt", f"{len(given)} prompts, allowed: 1 to {MAX_CHOICES // (body.n or 1)} with this n")
    return list(given)  # type: ignore[arg-type]  # no list of ints


async def _tokens(
    service: Service, given: Sequence[str | list[int]], add_special_tokens: bool = False
) -> list[list[int]]:
    """The ids of texts; ids stay what they are."""
    texts = [each for each in given if isinstance(each, str)]

    def read() -> list[list[int]]:
        return service.tokenizer(texts, add_special_tokens=add_special_tokens).input_ids if texts else []

    ids = iter(await asyncio.to_thread(read) if sum(map(len, texts)) > _LONG else read())
    return [next(ids) if isinstance(each, str) else each for each in given]


async def _plan(service: Service, body: GenerationBody, asked: EndpointRequest, owner: Hashable) -> Plan:
    """The rest of the plan, which is the same for both endpoints."""
    lane = await service.lanes.get(body.drafter, body.rule)
    params, grammar = _params(body), await service.grammars.of(body, asked.reading.calls, lane)
    prediction = None
    if body.prediction is not None:  # an empty text predicts nothing
        (ids,) = await _tokens(service, [joined(body.prediction.content)])
        prediction = ids or None
    eos = sorted({*(() if body.ignore_eos else lane.eos), *(body.stop_token_ids or ())})
    if len(eos) > lane.max_eos:
        raise refused("stop_token_ids", f"{len(eos)} ids with those of the model, allowed: {lane.max_eos}")
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    copies = body.n or 1
    # The copies of a prompt have the seeds that they have if it is the only one. Seeds that are drawn are not shared.
    seeds = [body.seed if body.seed is not None else secrets.randbelow(2**53) for _ in asked.prompts]
    scope = (None if service.settings.share_prefixes else owner, body.cache_salt)
    requests, cuts, reading = list[Request](), list[StopCut](), asked.reading
    for prompt, seed in zip(asked.prompts, seeds, strict=True):
        new = _new_tokens(lane, len(prompt.tokens), asked)
        if (body.min_tokens or 0) > new:
            raise refused("min_tokens", f"got {body.min_tokens}, allowed: 0 to {new}, the most tokens of this text")
        for copy in range(copies):
            stop = TextStop(reading.detokenizer, prompt.tokens, body.stop_strings) if body.stop_strings else None
            cuts.append(StopCut(body.stop_strings, body.include_stop_str_in_output is True))
            requests.append(
                Request(
                    prompt.tokens,
                    new,
                    params,
                    next_seed(seed, copy),
                    eos,
                    reading.stop(prompt.tokens, stop),
                    bias,
                    service.tail,
                    body.min_tokens or 0,
                    top_log_probs=asked.top,
                    prompt_log_probs=asked.prompt_top,
                    num_drafts=body.num_drafts,
                    prediction=prediction,
                    owner=owner,
                    scope=scope,
                    grammar=grammar,
                    report_drafts=body.specdec is not None and body.specdec.steps is True,
                )
            )
    return Plan(lane, asked.prompts, requests, cuts, asked.field, reading)


def _params(body: GenerationBody) -> SamplingParams:
    try:
        return SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=None if body.top_k in (None, -1, 0) else body.top_k,
            **{name: getattr(body, name) for name in ("top_p", "min_p", *SamplingParams.PENALTIES)},
        )
    except ValueError as error:
        raise ApiError.invalid(error) from error


def _new_tokens(lane: Lane, prompt: int, asked: EndpointRequest) -> int:
    """How many tokens the text may have. Raises ApiError if they do not fit."""
    room, most = lane.max_length - prompt, asked.max_tokens
    new = min(asked.default_tokens or room, room) if most is None else most
    if new > room or most is None and room < 1:
        message = (
            f"This model's maximum context length is {lane.max_length} tokens. However, you requested "
            f"{prompt + max(new, 1)} tokens ({prompt} in the prompt; {max(new, 1)} for the completion)."
        )
        raise ApiError(400, message, "context_length_exceeded", asked.field)
    return new
