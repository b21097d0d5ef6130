"""Messages of a conversation, and the tools that its next answer may call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from .errors import ApiError
from .field_types import Strict, only, told
from .json_body import check_json

MAX_TOOLS = 128


class TextPart(Strict):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Annotated[Any, only()] = None


Content = Annotated[str | list[TextPart], told('a text, or a list of parts {"type": "text", "text": ...}')]


class HasText(Protocol):
    text: str


def joined(content: str | Sequence[HasText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _json_object(text: str) -> str:
    if not text.strip():  # what clients send of a call without arguments
        return "{}"
    try:
        check_json(text.encode())
        fine = isinstance(json.loads(text), dict)
    except ApiError:
        fine = False
    if not fine:
        raise PydanticCustomError("form", "allowed: a JSON object, as text")
    return text


JsonObject = Annotated[str, AfterValidator(_json_object)]


class CalledFunction(Strict):
    name: str
    arguments: JsonObject


class ToolCall(Strict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Strict):
    """A message of a conversation. What clients send back of an answer of this server is taken, too."""

    model_config = ConfigDict(validate_default=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # another name of the same
    content: Content | None = None
    name: Annotated[Any, only()] = None
    refusal: Annotated[Any, only()] = None
    audio: Annotated[Any, only()] = None
    annotations: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only()] = None

    @field_validator("tool_calls", "tool_call_id", "reasoning", "reasoning_content", "content")
    @classmethod
    def _fits_role(cls, value: Any, info: ValidationInfo) -> Any:
        role, field = info.data.get("role"), info.field_name
        if field == "content":
            fits, allowed = value is not None or info.data.get("tool_calls"), "a text, or null with tool_calls"
        elif field == "tool_call_id":
            fits, allowed = (value is not None) == (role == "tool"), "the id of a call with role tool, null with others"
        else:
            fits, allowed = not value or role == "assistant", "null but with role assistant"
        if not fits:
            raise PydanticCustomError("form", "allowed: {allowed}", {"allowed": allowed})
        return value

    def rendered(self) -> dict[str, Any]:
        """As chat templates read it. Arguments are objects there, so that each template writes them in its own way."""
        told: dict[str, Any] = {"role": self.role, "content": "" if self.content is None else joined(self.content)}
        if self.tool_calls:
            told["tool_calls"] = [call.model_dump() for call in self.tool_calls]
            for call in told["tool_calls"]:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if self.tool_call_id is not None:
            told["tool_call_id"] = self.tool_call_id
        if reasoning := self.reasoning or self.reasoning_content:
            told |= {"reasoning": reasoning, "reasoning_content": reasoning}
        return told


class Function(Strict):
    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # whether arguments fit the schema wherever it is called

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return self.parameters or {"additionalProperties": False}


class Tool(Strict):
    type: Literal["function"]
    function: Function

    def rendered(self) -> dict[str, Any]:
        """As chat templates read it: they expect to find what may be left out."""
        function = self.function
        schema = function.parameters or {"type": "object", "properties": {}}
        told = {"name": function.name, "description": function.description or "", "parameters": schema}
        return {"type": "function", "function": told}


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction
