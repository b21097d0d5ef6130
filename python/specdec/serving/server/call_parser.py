"""Reads calls that are JSON between two marks, in whose strings the marks mean nothing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from .answer_reader import Parser
from .call_grammar import Marks


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
