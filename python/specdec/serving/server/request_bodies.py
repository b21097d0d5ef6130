"""The fields of requests. Each documented field of OpenAI's two endpoints is here: supported, or refused by name unless
its value asks for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ...checks import shown
from .errors import ApiError
from .field_types import Strict, only, told
from .messages import MAX_TOOLS, Content, Message, NamedTool, Tool

MAX_CHOICES = 128  # of one request
MAX_TOP = 20
MAX_STOP = 1024  # characters of a stop string


class PredictedOutput(Strict):
    """OpenAI's Predicted Outputs: the text that the answer will probably have, at least in parts."""

    type: Literal["content"]
    content: Content


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, every chunk has the usage so far
    include_obfuscation: Annotated[Any, only(False)] = None


class Details(Strict):
    """Our extension: what to tell of the decoding."""

    steps: bool | None = None


# Each text of a request follows each of its stop strings, so one of a megabyte would cost as much as thousands.
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=4)],
    told(f"a string or up to 4, each of 1 to {MAX_STOP} characters"),
]
Bias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    told("token ids, with numbers from -100 to 100"),
]
Id = Annotated[int, Field(ge=0, lt=2**31)]
# It fails fast, or a long list of what is none would cost a second, for all its errors.
Ids = Annotated[list[Id], Field(fail_fast=True)]


class JsonSchema(Strict):
    """It is always enforced, whatever ``strict`` says; ``name`` and ``description`` are for models of OpenAI."""

    name: str = Field(min_length=1, max_length=64)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Strict):
    """What the texts have to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """vLLM's: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        return {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}


class GenerationBody(Strict):
    """What both endpoints take."""

    model: str | None = None  # OpenAI's interface asks for it; here there is only one
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Bias | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    prediction: PredictedOutput | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None  # a label for the sender's own use

    # vLLM's extensions
    top_k: int | None = Field(None, ge=-1, le=2**24)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=1e-3, le=1e3)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: Annotated[Any, only(True)] = None
    spaces_between_special_tokens: Annotated[Any, only(True)] = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    structured_outputs: StructuredOutputs | None = None

    # ours
    drafter: str | None = None
    rule: str | None = None
    num_drafts: int | None = Field(None, ge=0)
    specdec: Details | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


Prompt = Annotated[
    str | Annotated[list[str], Field(fail_fast=True)] | Ids | Annotated[list[Ids], Field(fail_fast=True)],
    told("a text, a list of texts, a list of token ids, or a list of such lists"),
]


class CompletionRequest(GenerationBody):
    prompt: Prompt | None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    suffix: Annotated[Any, only()] = None
    add_special_tokens: bool | None = None


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    told('none, auto, required, or {"type": "function", "function": {"name": ...}}'),
]


class ChatRequest(GenerationBody):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    add_special_tokens: Annotated[Any, only(False)] = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's
    # Labels for the sender's own use, like ``user``
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Not supported
    audio: Annotated[Any, only()] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    functions: Annotated[Any, only([])] = None
    metadata: Annotated[Any, only({})] = None
    modalities: Annotated[Any, only(["text"])] = None
    moderation: Annotated[Any, only()] = None
    prompt_cache_options: Annotated[Any, only()] = None
    prompt_cache_retention: Annotated[Any, only()] = None
    reasoning_effort: Annotated[Any, only()] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    store: Annotated[Any, only(False)] = None
    verbosity: Annotated[Any, only("medium")] = None
    web_search_options: Annotated[Any, only()] = None

    @property
    def offered(self) -> list[Tool]:
        """The tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []


def refusal(errors: Sequence[Any]) -> ApiError:
    """The answer to a body of which pydantic says ``errors``: the first one."""
    error = errors[0]
    places = [place if isinstance(place, int) else place[:60] for place in error["loc"] if place != "body"]
    param = "".join(f"[{place}]" if isinstance(place, int) else f".{place}" for place in places).lstrip(".")
    kind, message = error["type"], error["msg"]
    if kind == "missing":
        return ApiError(400, f"{param or 'body'}: missing", "missing_required_parameter", param or None)
    if kind == "extra_forbidden":
        return ApiError(400, f"{param}: unknown field", "unknown_parameter", param)
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {error.get('ctx', {}).get('error', message)}", "invalid_json")
    code = "unsupported_parameter" if kind == "unsupported" else "invalid_value"
    return ApiError(400, f"{param or 'body'}: got {_given(error['input'])}, {message}", code, param or None)


def _given(value: object) -> str:
    if isinstance(value, list | dict):  # which may be large and deep
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return shown(value[:60] if isinstance(value, str) else value)
