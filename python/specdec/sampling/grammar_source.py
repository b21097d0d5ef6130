"""What a text has to be, before a tokenizer is known: the kind of a grammar and its words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..checks import refuse, shown

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

LONGEST = 65_536  # characters of a grammar
MOST_CHOICES = 1_000
_DEEPEST, _MOST_VALUES = 64, 4_096  # of a schema: compiling takes the square of the number of its properties
_MOST_REPEATS = 4_096  # of a regex, where repetitions within repetitions multiply
# One or two blanks, or a new line with the indentation of 8 levels. Without a bound a small model may write blanks
# until its text is full.
_WHITE_SPACE = r"( {1,2}|\n {0,16})"


@dataclass(frozen=True)
class GrammarSource:
    """A grammar as it was given. Made by the methods below, which raise ValueError for what is malformed.

    Attributes:
        kind: "json_object", "json_schema", "regex", "choice" or "lark".
        text: the schema as JSON, the regex, the choices as a JSON list, or the grammar.

    Example:
        >>> from specdec import GrammarSource
        >>> GrammarSource.choice(["yes", "no"])
        GrammarSource(kind='choice', text='["yes", "no"]')
    """

    kind: str
    text: str

    @classmethod
    def json_object(cls) -> GrammarSource:
        """Any JSON object."""
        return cls("json_object", '{"type": "object"}')

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, name: str = "grammar") -> GrammarSource:
        """JSON that a JSON Schema validates.

        Args:
            schema: an object, or its JSON. Keywords that llguidance does not know are refused when it is compiled.
            name: what errors call it.
        """
        if isinstance(schema, str):
            _check_length(name, schema)
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError):
                refuse(name, shown(schema), "a JSON Schema: a JSON object")
        if not isinstance(schema, Mapping):
            refuse(name, shown(schema), "a JSON Schema: a JSON object")
        _check_size(name, schema)
        return cls("json_schema", _check_length(name, json.dumps(schema, ensure_ascii=False)))

    @classmethod
    def regex(cls, regex: str, name: str = "grammar") -> GrammarSource:
        """What a regular expression matches as a whole: Rust's syntax, without look-around and back-references."""
        return cls("regex", _check_repeats(name, _check_text(name, regex, "a regular expression")))

    @classmethod
    def choice(cls, choices: Sequence[str], name: str = "grammar") -> GrammarSource:
        """One of these texts."""
        allowed = f"1 to {MOST_CHOICES} texts, none of them empty"
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not 0 < len(choices) <= MOST_CHOICES:
            refuse(name, shown(choices), allowed)
        for choice in choices:
            _check_text(name, choice, allowed)
        return cls("choice", _check_length(name, json.dumps(list(choices), ensure_ascii=False)))

    @classmethod
    def of_settings(cls, json_schema: str | None, regex: str | None) -> GrammarSource | None:
        """Those of options and of lines of jobs, of which one may be given; None: neither is."""
        if json_schema is None:
            return None if regex is None else cls.regex(regex, "regex")
        if regex is not None:
            refuse("json_schema / regex", "both", "one of the two")
        return cls.json_schema(json_schema, "json_schema")

    @classmethod
    def lark(cls, grammar: str, name: str = "grammar") -> GrammarSource:
        """A Lark grammar in llguidance's dialect, or the JSON that its structural tags become."""
        return cls("lark", _check_repeats(name, _check_text(name, grammar, "a Lark grammar")))

    def after(self, mark: str, special: bool = False) -> GrammarSource:
        """Any text up to ``mark``, such as "</think>", and then this. It is one grammar, so the mark may come anywhere
        in what a step drafts.

        Args:
            special: whether the mark is an added token of the tokenizer, as special ones are: the library has none of
                them in other texts.
        """
        _check_text("mark", mark, "a text")
        if special and not (mark.startswith("<") and mark.endswith(">")):
            refuse("mark", shown(mark), "a special token in angle brackets")
        before = (
            f"start: TEXT {mark} @answer\nTEXT: "
            if special
            else (f"start: text @answer\ntext[suffix={json.dumps(mark, ensure_ascii=False)}]: ")
        )
        return self.joined(before + r"/(.|\n)*/", {"answer": self})

    @classmethod
    def joined(cls, grammar: str, parts: Mapping[str, GrammarSource], name: str = "grammar") -> GrammarSource:
        """A Lark grammar that has others in it.

        Args:
            grammar: as ``lark`` takes it.
            parts: what it calls ``@answer``, under "answer".
        """
        grammars: list[dict[str, Any]] = [{"name": "whole", "lark_grammar": cls.lark(grammar, name).text}]
        for called, part in parts.items():
            own = part.for_library()
            inner = json.loads(own)["grammars"] if own.lstrip().startswith("{") else [{"lark_grammar": own}]
            inner[0]["name"] = called
            grammars += inner
        return cls("lark", _check_length(name, json.dumps({"grammars": grammars}, ensure_ascii=False)))

    def for_library(self) -> str:
        """Returns it as llguidance compiles it. Raises ValueError with the library's words."""
        from llguidance import LLMatcher

        if self.kind in ("json_object", "json_schema"):
            overrides: JsonCompileOptions = {"whitespace_pattern": _WHITE_SPACE, "lenient": False}
            return LLMatcher.grammar_from_json_schema(self.text, overrides=overrides)
        if self.kind == "regex":
            return LLMatcher.grammar_from_regex(self.text)
        if self.kind == "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(self.text))
            return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
        # Structural tags become several grammars in one JSON, which a Lark grammar never begins as.
        return self.text if self.text.lstrip().startswith("{") else LLMatcher.grammar_from_lark(self.text)


def _check_text(name: str, text: object, allowed: str) -> str:
    if not isinstance(text, str) or not text:
        refuse(name, shown(text), allowed)
    _check_length(name, text)
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        refuse(name, "a NUL or a lone surrogate", f"{allowed} without them")
    return text


def _check_length(name: str, text: str) -> str:
    if len(text) > LONGEST:
        refuse(name, f"{len(text)} characters", f"up to {LONGEST}")
    return text


def _check_size(name: str, schema: object) -> None:
    """Bounds what compiling costs, since nothing can interrupt it."""
    level, count, depth = [schema], 1, 0  # values of one depth, those so far, and the depth
    while level:
        if depth > _DEEPEST:
            refuse(name, f"a schema nested more than {_DEEPEST} deep", f"up to {_DEEPEST}")
        if count > _MOST_VALUES:
            refuse(name, f"a schema of more than {_MOST_VALUES} values", f"up to {_MOST_VALUES}")
        values: list[object] = []
        for each in level:
            if isinstance(each, Mapping):
                values += each.values()
                for pattern in (each.get("pattern"), *_keys(each.get("patternProperties"))):
                    if isinstance(pattern, str):
                        _check_repeats(name, pattern)
            elif isinstance(each, list):
                values += each
        level, count, depth = values, count + len(values), depth + 1


def _keys(value: object) -> Iterable[object]:
    return value if isinstance(value, Mapping) else ()


def _check_repeats(name: str, regex: str) -> str:
    if (repeats := _repeats(regex)) > _MOST_REPEATS:
        refuse(name, f"repetitions that multiply to {repeats}", f"up to {_MOST_REPEATS}")
    return regex


def _repeats(regex: str) -> int:
    """An upper bound of how often the counted repetitions of a regex, one in the other, repeat something."""
    most, groups, last, i = 1, [1], 1, 0
    while i < len(regex):
        character = regex[i]
        if character == "\\":
            last, i = 1, i + 1
        elif character == "[":
            end = regex.find("]", i + 2)
            last, i = 1, len(regex) if end < 0 else end
        elif character == "(":
            groups.append(1)
        elif character == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] = max(groups[-1], last)
        elif character == "{":
            inside, closed, _ = regex[i + 1 : i + 64].partition("}")
            numbers = [n.strip().lstrip("0")[:10] for n in inside.split(",") if n.strip().isdecimal() and n.isascii()]
            if not closed and inside[:1].isdigit():
                return _MOST_REPEATS + 1  # nobody writes a number of so many digits
            last *= max((int(n or 1) for n in numbers), default=1)
            groups[-1] = max(groups[-1], last)
            i += len(inside) + 1 if closed else 0
        elif character not in "*+?":
            last = 1
        most, i = max(most, groups[-1]), i + 1
    return most
