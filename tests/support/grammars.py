"""Grammars over a vocabulary of five tokens, and the same by definition; JSON Schemas of many kinds."""

from __future__ import annotations

import functools
import itertools
import re

from specdec.sampling.grammar import Grammar
from specdec.sampling.grammar_source import GrammarSource

TOKENS = ("a", "b", "c", "", "ab")
END = 3
LANGUAGE = "(a|b|cc)(b|c)*"  # what it forces is one token long, so every way to write a text in tokens is allowed


class _Vocabulary:
    eos_token_id, bos_token_id, special_token_ids = END, None, [END]
    tokens = [token.encode() or b"<end>" for token in TOKENS]

    def __call__(self, text: bytes | str) -> list[int]:
        return [TOKENS.index(character) for character in (text.decode() if isinstance(text, bytes) else text)]


@functools.cache
def tiny_grammar() -> Grammar:
    """LANGUAGE, for a model with five tokens."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    source = GrammarSource.regex(LANGUAGE)
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(_Vocabulary())), source.for_library(), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return Grammar(source, len(TOKENS), frozenset([END]), matcher)


@functools.cache
def tiny_allowed(text: tuple[int, ...]) -> list[int]:
    """The tokens after which ``text`` is still a beginning of a word of LANGUAGE; the end where it is a word."""
    before = "".join(TOKENS[token] for token in text)
    if END in text:
        return [END]
    endings = ["".join(each) for n in range(3) for each in itertools.product("abc", repeat=n)]

    def begins(beginning: str) -> bool:
        return any(re.fullmatch(LANGUAGE, beginning + ending) for ending in endings)

    found = [i for i, token in enumerate(TOKENS) if token and begins(before + token)]
    return [*found, END] if re.fullmatch(LANGUAGE, before) else found


def an_object(**properties: dict) -> dict:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


WORD = {"type": "string", "maxLength": 8}
SCHEMAS = {
    "object": an_object(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "nested": an_object(
        user=an_object(name=WORD, address=an_object(city=WORD, zip={"type": "string", "pattern": "^[0-9]{5}$"}))
    ),
    "optional": {**an_object(a=WORD, b={"type": "boolean"}), "required": ["b"]},
    "enum": an_object(colour={"enum": ["red", "green", "blue"]}, size={"enum": [1, 2, 3, None]}),
    "const": an_object(version={"const": 2}, kind={"const": "point"}),
    "references": {
        "$defs": {"point": an_object(x={"type": "integer"}, y={"type": "integer"})},
        **an_object(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "date": an_object(day={"type": "string", "format": "date"}),
    "date-time": an_object(at={"type": "string", "format": "date-time"}),
    "email": an_object(id={"type": "string", "format": "uuid"}, address={"type": "string", "format": "ipv4"}),
    "bounds": an_object(
        low={"type": "number", "minimum": -1.5, "maximum": 2.5},
        high={"type": "integer", "exclusiveMinimum": 9, "maximum": 20},
    ),
    "array": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [WORD, {"type": "boolean"}], "items": False, "minItems": 2},
    "objects": {"type": "array", "items": an_object(on={"type": "boolean"}), "minItems": 1, "maxItems": 3},
    "any of": an_object(value={"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, WORD, {"type": "null"}]}),
    "lengths": an_object(code={"type": "string", "minLength": 3, "maxLength": 5}),
    "pattern": an_object(plate={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"}),
    "map": {
        "type": "object",
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "maxProperties": 2,
    },
    "plain": {"type": "string", "maxLength": 12},
    "recursive": {
        "$defs": {
            "node": an_object(leaf={"type": "boolean"}, more={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})
        },
        "$ref": "#/$defs/node",
    },
    "all of": {"allOf": [an_object(a={"type": "integer", "minimum": 0, "maximum": 99})]},
}
