"""The prompt of a chat, with the tools that its answer may call, and how that answer is read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ...chat_template import chat_tokens, template_text
from ...checks import refuse, shown
from ...detokenize import Detokenizer, IncrementalText
from ...stopping import StoppingCriteria
from .answer_reader import AnswerReader
from .call_grammar import CallGrammar
from .dialect import AnswerForm
from .errors import ApiError, refused
from .messages import NamedTool
from .request_bodies import ChatRequest
from .service import Service

_UNSUPPORTED = ("unsupported_parameter", "tools")


class Reading(NamedTuple):
    """How the texts of a request are read.

    Attributes:
        detokenizer: of all that the reader has to see.
        new_reader: makes one for each text.
        one_call: whether a text ends with its first call.
        calls: what a text has to be; None: anything, or what other fields say.
    """

    detokenizer: Detokenizer
    new_reader: Callable[[], AnswerReader]
    one_call: bool = False
    calls: CallGrammar | None = None

    def stop(self, prompt: Sequence[int], other: StoppingCriteria | None) -> StoppingCriteria | None:
        """What ends a text: ``other``, and its first call."""
        if not self.one_call:
            return other
        return CallStop(self.new_reader(), IncrementalText(self.detokenizer, prompt), other)


def read_chat(service: Service, body: ChatRequest) -> tuple[list[int], Reading]:
    """Returns the prompt of a chat. Takes its time, since a template is a program.

    Raises:
        ApiError: names the field that this model cannot have.
        ValueError: names one that does not go together with others; and as ``chat_prompt``.
    """
    tokenizer, dialect = service.tokenizer, service.dialect
    _check_tools(body)
    tools = [tool.rendered() for tool in body.offered]
    messages = [message.rendered() for message in body.messages]
    variables = _variables(tokenizer, body.chat_template_kwargs or {})
    text = template_text(tokenizer, messages, variables={**variables, "tools": tools or None})
    form = dialect.with_tools if tools else dialect.plain
    if tools:
        if form is None:
            told = "not with this model: how it writes calls is not known; the server's --response-template says it"
            raise ApiError(400, f"tools: {told}", *_UNSUPPORTED)
        if text == template_text(tokenizer, messages, variables=variables):
            raise ApiError(400, "tools: not with this model: its chat template ignores them", *_UNSUPPORTED)
    tokens = chat_tokens(tokenizer, text)
    if form is None:
        return tokens, Reading(service.detokenizer, AnswerReader)
    one_call = bool(tools) and body.parallel_tool_calls is False
    calls = _call_grammar(body, form, text)
    return tokens, Reading(form.detokenizer, lambda: form.reader(text, tools), one_call, calls)


def _check_tools(body: ChatRequest) -> None:
    choice = body.tool_choice
    if choice not in (None, "none", "auto") and not body.tools:
        refuse("tool_choice", "required or a function without tools", "none or auto")
    if isinstance(choice, NamedTool):
        names = [tool.function.name for tool in body.offered]
        if choice.function.name not in names:
            refuse("tool_choice", shown(choice.function.name), ", ".join(names))
    for name, field in (("response_format", body.response_format), ("structured_outputs", body.structured_outputs)):
        if body.offered and field is not None and getattr(field, "type", None) != "text":
            refuse(name, "one with tools", "one without tools, or with tool_choice none")


def _call_grammar(body: ChatRequest, form: AnswerForm, prompt: str) -> CallGrammar | None:
    """Calls that are required fit their schemas, and so do those of strict functions."""
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    required = named is not None or body.tool_choice == "required"
    functions = [tool.function for tool in body.offered]
    if not required and not any(function.strict for function in functions):
        return None
    schemas = [
        (function.name, function.schema_of_arguments if required or function.strict else {})
        for function in functions
        if named in (None, function.name)
    ]
    return form.call_grammar(prompt, schemas, required, body.parallel_tool_calls is not False)


def _variables(tokenizer: PreTrainedTokenizerBase, given: dict[str, Any]) -> dict[str, Any]:
    """The fields that only this model's chat template knows. Raises ApiError if it does not."""
    source = str(tokenizer.chat_template)
    ours = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages", *tokenizer.special_tokens_map}
    for name in given:
        if name in ours or not name.isidentifier() or not re.search(rf"\b{name}\b", source):
            allowed = "what the chat template of this model reads, and the server does not set"
            raise refused("chat_template_kwargs", f"got {name[:60]!r}, allowed: {allowed}")
    return given


class CallStop:
    """Ends one sequence with the token that completes its first call, or where ``other`` does."""

    def __init__(self, reader: AnswerReader, incremental: IncrementalText, other: StoppingCriteria | None):
        self._reader, self._incremental, self._other = reader, incremental, other

    def first_end(self, sequence: int, text: list[int], new: int) -> int | None:
        """As ``StoppingCriteria`` has it."""
        others = None if self._other is None else self._other.first_end(sequence, text, new)
        for kept, token in enumerate(text[len(text) - new :], start=1):
            if kept == others:
                break
            if self._reader.push(self._incremental.push([token])).calls:
                return kept
        return others
