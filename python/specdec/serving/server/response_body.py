"""The fields of ``POST /v1/responses``, which keeps nothing between two requests, and the chat that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from .errors import ApiError
from .field_types import Strict, only, told
from .messages import MAX_TOOLS, Function, JsonObject, Message, NamedFunction, NamedTool, Tool, joined
from .request_bodies import ChatRequest, GenerationBody, JsonSchema, ResponseFormat


class TextOfInput(Strict):
    """Also one of an answer that comes back."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[Any, only([])] = None
    logprobs: Annotated[Any, only([])] = None
    prompt_cache_breakpoint: Annotated[Any, only()] = None


InputContent = Annotated[
    str | list[TextOfInput], told('a text, or a list of parts {"type": "input_text", "text": ...}')
]


class Item(Strict):
    """What answers have beside what they say."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: InputContent
    phase: Annotated[Any, only()] = None


class CallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: JsonObject
    caller: Annotated[Any, only()] = None
    namespace: Annotated[Any, only()] = None


class CallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: InputContent


class TextOfReasoning(Strict):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: Annotated[Any, only([])] = None
    content: list[TextOfReasoning] | None = None
    encrypted_content: Annotated[Any, only()] = None


def _kind(item: Any) -> str | None:
    return item.get("type", "message") if isinstance(item, dict) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="form",
        custom_error_message="allowed: an item of type message, function_call, function_call_output or reasoning",
    ),
]


def _as_items(given: object) -> object:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class ResponseTool(Function):
    type: Literal["function"]
    allowed_callers: Annotated[Any, only()] = None
    defer_loading: Annotated[Any, only(False)] = None
    output_schema: Annotated[Any, only()] = None


class NamedResponseTool(NamedFunction):
    type: Literal["function"]


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]
    name: str = Field("unnamed", min_length=1, max_length=64)


class TextSettings(Strict):
    format: TextFormat | None = None
    verbosity: Annotated[Any, only("medium")] = None


ResponseToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedResponseTool,
    told('none, auto, required, or {"type": "function", "name": ...}'),
]


class ResponsesRequest(GenerationBody):
    """The sampling fields of the other endpoints are taken here, too."""

    input: Annotated[list[InputItem], Field(min_length=1), BeforeValidator(_as_items)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    text: TextSettings | None = None
    tools: list[ResponseTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's
    # Labels for the sender's own use, like ``user``
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Not supported, or others' names for what is
    max_tokens: Annotated[Any, only()] = None
    n: Annotated[Any, only(1)] = None
    response_format: Annotated[Any, only()] = None
    prompt_logprobs: Annotated[Any, only()] = None
    specdec: Annotated[Any, only()] = None
    stream_options: Annotated[Any, only({}, {"include_obfuscation": False})] = None
    access_programs: Annotated[Any, only()] = None
    background: Annotated[Any, only(False)] = None
    background_options: Annotated[Any, only()] = None
    context_management: Annotated[Any, only([])] = None
    conversation: Annotated[Any, only()] = None
    image: Annotated[Any, only()] = None
    include: Annotated[Any, only([])] = None
    max_tool_calls: Annotated[Any, only()] = None
    metadata: Annotated[Any, only({})] = None
    moderation: Annotated[Any, only()] = None
    previous_response_id: Annotated[Any, only()] = None
    prompt: Annotated[Any, only()] = None
    prompt_cache_options: Annotated[Any, only()] = None
    prompt_cache_retention: Annotated[Any, only()] = None
    reasoning: Annotated[Any, only({})] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    store: Annotated[Any, only(False)] = None
    top_logprobs: Annotated[Any, only(0)] = None
    truncation: Annotated[Any, only("disabled")] = None


# What has the same name and meaning in both.
_SHARED = [name for name in GenerationBody.model_fields if name not in ResponsesRequest.__annotations__]
# Names of a chat's fields -> what clients call them here.
_FIELDS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The chat with the same answer."""
    choice = body.tool_choice
    if isinstance(choice, NamedResponseTool):
        choice = NamedTool(type="function", function=NamedFunction(name=choice.name))  # type: ignore[assignment]
    tools = None if body.tools is None else [Tool(type="function", function=tool) for tool in body.tools]
    return ChatRequest(
        **{name: getattr(body, name) for name in _SHARED},
        messages=_messages(body.instructions, body.input),
        max_completion_tokens=body.max_output_tokens,
        response_format=_format(body.text),
        tools=tools,
        tool_choice=choice,  # type: ignore[arg-type]
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def renamed(error: ApiError) -> ApiError:
    """An error about a field of the chat, with the client's name for it."""
    name = error.param or ""
    return error.about(_FIELDS.get(name, name))


def _format(text: TextSettings | None) -> ResponseFormat | None:
    form = None if text is None else text.format
    if form is None:
        return None
    schema = JsonSchema(name=form.name, schema=form.schema_) if form.type == "json_schema" else None
    return ResponseFormat(type=form.type, json_schema=schema)


def _messages(instructions: str | None, items: Sequence[Any]) -> list[Message]:
    """The messages of a conversation. What an answer says, thinks and calls, one item each, is one message."""
    found: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]

    def answer(*ended_by: str) -> dict[str, Any]:
        if not found or found[-1]["role"] != "assistant" or any(name in found[-1] for name in ended_by):
            found.append({"role": "assistant"})
        return found[-1]

    for item in items:
        if isinstance(item, ReasoningItem):
            own = answer("content", "tool_calls")
            own["reasoning"] = own.get("reasoning", "") + joined(item.content or [])
        elif isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            answer().setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, CallOutputItem):
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": joined(item.output)})
        elif item.role == "assistant":
            answer("content", "tool_calls")["content"] = joined(item.content)
        else:
            found.append({"role": item.role, "content": joined(item.content)})
    return [Message(**{"content": None if "tool_calls" in each else "", **each}) for each in found]
