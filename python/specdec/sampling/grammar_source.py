"""What a text has to be, before a tokenizer is known: the kind of a grammar and its words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..checks import refuse, shown
from .grammar_limits import LONGEST, check_repeats
from .schema_checks import check_schema, read_schema, schemas_in

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MOST_CHOICES = 1_000
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
                schema = read_schema(schema)
            except (ValueError, RecursionError):
                refuse(name, shown(schema), "a JSON Schema: a JSON object")
        if not isinstance(schema, Mapping):
            refuse(name, shown(schema), "a JSON Schema: a JSON object")
        check_schema(name, schema)
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:  # other objects, and integers of more digits than Python writes
            refuse(name, f"a schema that cannot be written ({error})", "values of JSON")
        return cls("json_schema", _check_length(name, text))

    @classmethod
    def regex(cls, regex: str, name: str = "grammar") -> GrammarSource:
        """What a regular expression matches as a whole: Rust's syntax, without look-around and back-references."""
        return cls("regex", check_repeats(name, _check_text(name, regex, "a regular expression")))

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
        text = check_repeats(name, _check_text(name, grammar, "a Lark grammar"))
        for schema in schemas_in(text):
            check_schema(name, schema)
        return cls("lark", text)

    def after(self, mark: str | int) -> GrammarSource:
        """Any text up to ``mark``, such as "</think>", and then this. It is one grammar, so the mark may come anywhere
        in what a step drafts.

        Args:
            mark: a text, or the id of an added token of the tokenizer, as special ones are: the library has none of
                them in a text.
        """
        if isinstance(mark, int):
            if isinstance(mark, bool) or mark < 0:
                refuse("mark", mark, "a text, or the id of an added token")
            before = f"start: TEXT <[{mark}]> @answer\nTEXT: "
        else:
            _check_text("mark", mark, "a text, or the id of an added token")
            before = f"start: text @answer\ntext[suffix={json.dumps(mark, ensure_ascii=False)}]: "
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
