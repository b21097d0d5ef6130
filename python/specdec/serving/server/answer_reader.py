"""What a model writes, divided into content, reasoning and calls of tools as it comes."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from .errors import ApiError

log = logging.getLogger(__name__)
CONTENT, REASONING, CALLS = "content", "reasoning", "tool_calls"


class Parser(Protocol):
    """``ResponseParser`` of transformers."""

    initial_events: list[dict]

    def feed(self, text: str) -> list[dict]: ...

    def finalize(self) -> tuple[dict, list[dict]]: ...


class Field(NamedTuple):
    """Where the text of a region of the model's answer goes."""

    to: str  # CONTENT, REASONING or CALLS
    strip: bool = True  # white space at both ends does not count
    join: str = ""  # between two regions


class Call(NamedTuple):
    id: str
    name: str
    arguments: str  # JSON, as the model meant it


class Delta(NamedTuple):
    """What became final at one time."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class AnswerReader:
    """Reads one answer. How its text is divided into pieces changes nothing of what the deltas are together.

    What stands where a call should, and is none, is content.

    Args:
        parser: of the answer, which has seen the prompt; None: all of it is content.
        fields: of the parser's response template, by name.

    Attributes:
        content, reasoning, calls: of all deltas together.
    """

    def __init__(self, parser: Parser | None = None, fields: Mapping[str, Field] | None = None):
        self._parser, self._fields = parser, fields or {}
        self._texts = {CONTENT: _Text(), REASONING: _Text()}
        self._body = ""  # of the region that may be a call
        self.content = self.reasoning = ""
        self.calls: list[Call] = []
        if parser is not None:  # what the prompt has of the answer is no part of what the model writes
            self._read(parser.initial_events)

    def push(self, text: str) -> Delta:
        """Takes the next text. Raises ApiError if the response template cannot read it."""
        return self._add(Delta(text) if self._parser is None else self._read(self._events(text)))

    def finish(self) -> Delta:
        """The rest, if the text ends here. Raises ApiError as ``push``."""
        return self._add(Delta() if self._parser is None else self._read(self._events(None)))

    def _add(self, new: Delta) -> Delta:
        self.content, self.reasoning = self.content + new.content, self.reasoning + new.reasoning
        self.calls += new.calls
        return new

    def _events(self, text: str | None) -> list[dict]:
        assert self._parser is not None
        try:
            return self._parser.finalize()[1] if text is None else self._parser.feed(text)
        except Exception as error:  # a template is data that came with the model, and the text is anything
            log.warning("an answer was not read", extra={"facts": {"error": type(error).__name__}})
            told = "the text failed: the model's response template cannot read it"
            raise ApiError(500, told, "unreadable_answer") from error

    def _read(self, events: Iterable[dict]) -> Delta:
        new, calls = {CONTENT: "", REASONING: ""}, list[Call]()
        for event in events:
            field, kind = self._fields[event["field"]], event["type"]
            if field.to == CALLS:
                self._body = "" if kind == "region_open" else self._body + event.get("text", "")
                if kind != "region_close":
                    continue
                if found := _calls(event["value"]):
                    calls += found
                else:
                    new[CONTENT] += self._texts[CONTENT].push(self._body, True)
            elif kind == "region_open":
                self._texts[field.to].open(field)
            elif kind == "region_chunk":
                new[field.to] += self._texts[field.to].push(event["text"], field.strip)
        return Delta(new[CONTENT], new[REASONING], tuple(calls))


class _Text:
    """A text that comes in pieces, without the white space at its ends."""

    def __init__(self) -> None:
        self._begun, self._held, self._join = False, "", ""

    def open(self, field: Field) -> None:
        """A region begins, before which there may have been others."""
        if self._begun and field.join:
            self._begun, self._held, self._join = False, "", field.join

    def push(self, text: str, strip: bool) -> str:
        """Returns what is final now."""
        text, self._held = self._held + text, ""
        if strip:
            text = text if self._begun else text.lstrip()
            final = text.rstrip()
            text, self._held = final, text[len(final) :]
        if text and not self._begun:
            text, self._begun, self._join = self._join + text, True, ""
        return text


def _calls(value: Any) -> list[Call]:
    """The calls that a region was; none: it is something else."""
    found = []
    for each in value if isinstance(value, list) else [value]:
        function = each.get("function", each) if isinstance(each, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return []
        arguments = function.get("arguments", function.get("parameters"))  # Llama's word
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        found.append(Call(f"call_{uuid.uuid4().hex[:24]}", function["name"], arguments))
    return found
