"""The grammar of an answer that calls tools, in the form in which the model writes calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...checks import refuse
from ...sampling.grammar_source import GrammarSource

# An answer that is one call and nothing else, as Llama 3 writes it.
JSON_ALONE = {"open_pattern": r"\A\s*(?:<\|python_tag\|>\s*)?(?=\{)", "content": "json"}
_NOT_ALONE = r"/(?s:.*)/ & ~/\s*(<\|python_tag\|>\s*)?\{(?s:.*)/"  # what is not read as such a call
_TRANSFORM = {"type": "function", "function": "{content}"}


class Marks(NamedTuple):
    """What stands before and after a part of an answer."""

    begin: str
    end: str


class CallForm(NamedTuple):
    """A model's call of a tool, which is JSON.

    Attributes:
        marks: of each call. None: the answer is the JSON, so there is one call.
        arguments: their name in the JSON.
    """

    marks: Marks | None
    arguments: str


def call_form(field: Mapping[str, Any]) -> CallForm | None:
    """Returns how calls are written that a response template's field reads; None: not as JSON between two marks."""
    if field == JSON_ALONE:
        return CallForm(None, "parameters")
    plain = field.get("content") == "json" and field.get("transform", _TRANSFORM) == _TRANSFORM
    marks = marks_of(field)
    if marks is None or not plain or not {*field.get("content_args", {})} <= {"allow_non_json", "strip"}:
        return None
    return CallForm(marks, "arguments")


def marks_of(field: Mapping[str, Any]) -> Marks | None:
    """Returns what a field of a response template begins and ends with; None: there are several, or patterns."""
    begin, end = field.get("open"), field.get("close")
    if pattern := re.fullmatch(r"\\s\*([\w<>/ ]+)", field.get("open_pattern", "")):
        begin = pattern[1]
    return Marks(begin, end) if isinstance(begin, str) and isinstance(end, str) and begin and end else None


@dataclass(frozen=True)
class CallGrammar:
    """What an answer has to be that calls tools.

    Args:
        schemas: of the arguments of each tool that may be called, with its name.
        required: whether the answer is calls and nothing else, but for what is thought before them. Otherwise it is any
            text, in which what begins as a call is one.
        parallel: whether there may be several.
        thought: the marks of what may be thought before a required call. None: nothing may.
        thinking: whether the prompt has begun the thought.
        added: those of the marks that are added tokens of the tokenizer, with their ids. The library has no such token
            in a text, whether it is special or not.
    """

    form: CallForm
    schemas: Sequence[tuple[str, Mapping[str, Any]]]
    required: bool
    parallel: bool
    thought: Marks | None
    thinking: bool
    added: Mapping[str, int]

    def source(self) -> GrammarSource:
        """Raises ValueError if a schema is none, or too large."""
        parts, bodies = {}, []
        for i, (name, schema) in enumerate(self.schemas):
            if schema.get("type", "object") != "object":
                refuse("tools", f"parameters of {name} that are no object", 'those of "type": "object"')
            parts[f"tool_{i}"] = GrammarSource.json_schema({"type": "object", **schema}, name="tools")
            begin = f'{{"name": "{name}", "{self.form.arguments}": '
            bodies.append(f"{json.dumps(begin)} @tool_{i}")
        rules = ["ANY: /(.|\\n)*/", f'body: ({" | ".join(bodies)}) "}}"']
        if (marks := self.form.marks) is not None:
            rules.append(f'rest: "\\n"? body "\\n"? {self._mark(marks.end)}')
        rules += self._only_calls() if self.required else self._text_with_calls()
        return GrammarSource.joined("\n".join(rules), parts, name="tools")

    def _only_calls(self) -> list[str]:
        rules, calls = [], "body"
        if (marks := self.form.marks) is not None:
            rules.append(f"call: {self._mark(marks.begin)} rest")
            calls = 'call ("\\n"? call)*' if self.parallel else "call"
        if self.thought is None:
            return [*rules, f"start: {calls}"]
        begin, optional = ("", "") if self.thinking else (self._mark(self.thought.begin), "?")
        rules += self._until("thought_end", self.thought.end)
        return [*rules, f"start: ({begin} thought_end /\\n{{1,2}}/?){optional} {calls}"]

    def _text_with_calls(self) -> list[str]:
        if (marks := self.form.marks) is None:
            return [f"start: body | OTHER\nOTHER: {_NOT_ALONE}"]
        others = [f" | ANY {self._mark(text)}" for text in self.added if text not in marks]
        return [*self._until("call_begin", marks.begin), f"start: (call_begin rest{''.join(others)})* ANY"]

    def _until(self, rule: str, mark: str) -> list[str]:
        """Any text and ``mark``. An added token may also be spelled by others, which is the same text."""
        token = f" | ANY {self._mark(mark)}" if mark in self.added else ""
        return [f"{rule}: {rule}_spelled{token}", f"{rule}_spelled[lazy]: ANY {_quoted(mark)}"]

    def _mark(self, text: str) -> str:
        return f"<[{self.added[text]}]>" if text in self.added else _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
