"""What a model writes, divided into content, reasoning and calls of tools as it comes. The marks of calls mean nothing
inside of the strings of their JSON."""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from .call_grammar import Marks
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


class CallParser:
    """A parser of transformers, which would end a call at the first text that reads as its end. What it is given of a
    call has the first character of that mark as an escape wherever it is inside of a string, which is the same JSON.

    Args:
        parser: of one answer.
        calls: the fields that are such calls.
        marks: of each call; the second one begins with neither a quote nor a backslash.
    """

    def __init__(self, parser: Parser, calls: Collection[str], marks: Marks):
        self._parser, self._calls, self._end = parser, calls, marks.end[0]
        # No piece has more than one end of a mark or of a string, so that what it opens is known before the next one.
        ends = f'"{re.escape(marks.begin[-1])}{re.escape(marks.end[-1])}'
        self._pieces = re.compile(f"[^{ends}]*[{ends}]|[^{ends}]+")
        self._strings: _Strings | None = None  # of the call that is being read
        self.initial_events = self._read(parser.initial_events)

    def feed(self, text: str) -> list[dict]:
        events = []
        for piece in self._pieces.findall(text):
            given = piece if self._strings is None else self._strings.push(piece)
            events += self._read(self._parser.feed(given))
        return events

    def finalize(self) -> tuple[dict, list[dict]]:
        message, events = self._parser.finalize()
        return message, self._read(events)

    def _read(self, events: Iterable[dict]) -> list[dict]:
        """Follows the calls, and returns the events with the text as it was."""
        read, opened = [], False
        for event in events:
            if event["field"] in self._calls:
                match event["type"]:
                    case "region_open":
                        self._strings, opened = _Strings(self._end), True
                    case "region_close":
                        self._strings = None
                    case _ if self._strings is not None:
                        if opened:  # by the same piece, of which this is the rest
                            self._strings.push(event["text"])
                        event = {**event, "text": self._strings.restored(event["text"])}
            read.append(event)
        return read


class _Strings:
    """Follows JSON that comes in pieces, and writes one character as an escape inside of its strings."""

    def __init__(self, character: str):
        self._character, self._escape = character, f"\\u{ord(character):04x}"
        self._inside = self._escaped = False

    def push(self, text: str) -> str:
        written = []
        for c in text:
            if not self._inside:
                self._inside = c == '"'
            elif self._escaped:
                self._escaped = False
            elif c == "\\":
                self._escaped = True
            elif c in '"\n':  # no string of JSON goes on in the next line, so this one is none, and hides no end
                self._inside = False
            elif c == self._character:
                c = self._escape
            written.append(c)
        return "".join(written)

    def restored(self, text: str) -> str:
        return text.replace(self._escape, self._character)
