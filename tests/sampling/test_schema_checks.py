"""What a schema is refused for by name, and that nothing else is rounded or lost."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal

import pytest
from specdec.sampling.grammar import check_source
from specdec.sampling.grammar_fork import text_matcher
from specdec.sampling.grammar_source import GrammarSource

schema, lark = GrammarSource.json_schema, GrammarSource.lark
BIG = 1234567890123456789


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"enum": [BIG, BIG - 1]}, f"enum with {BIG}"),
        ({"const": -(2**63)}, f"const with {-(2**63)}"),
        ({"const": [1, {"a": 2**53 + 1}]}, f"const with {2**53 + 1}"),
        ({"properties": {"a": {"minimum": -(2**63)}}}, f"minimum with {-(2**63)}"),
        ({"anyOf": [{"maximum": 2**60}]}, f"maximum with {2**60}"),
        ({"exclusiveMinimum": float("inf")}, "exclusiveMinimum with inf"),
        ({"exclusiveMaximum": 1e300}, "exclusiveMaximum with 1e"),
        ({"multipleOf": 0.1 + 0.2}, "multipleOf with 0.30000000000000004"),
        ('{"const": 0.123456789012345678}', "const with 0.123456789012345678"),
        ('{"maximum": 1e400}', "maximum with 1e400"),
        ('{"minimum": 1e-99999999999999999999999}', "minimum with 1e-9999"),
        ({"x-guidance": {"item_separator": ";"}}, 'the keyword "x-guidance"'),
        ({"items": {"x-guidance": {"coerce_one_of": True}}}, 'the keyword "x-guidance"'),
        ({"minProperties": 2}, "minProperties 2, allowed: up to 1"),
        ({"minProperties": 3, "required": ["a", "a"]}, "minProperties 3, allowed: up to 2"),
    ],
)
@pytest.mark.parametrize("embedded", ["", "lark", "json in lark", "parts"])
def test_what_the_library_does_not_keep_is_refused_by_name(given, told, embedded):
    text = given if isinstance(given, str) else json.dumps(given).replace("Infinity", "1e999")
    told = told.replace("inf", "1e999")
    make = {
        "": lambda: schema(text, "field"),
        "lark": lambda: lark(f"start: %json\n {text}", "field"),
        "json in lark": lambda: lark(json.dumps({"grammars": [{"lark_grammar": f"start: %json {text}"}]}), "field"),
        "parts": lambda: lark(f'{{"grammars": [{{"json_schema": {text}}}]}}', "field"),
    }
    with pytest.raises(ValueError) as error:
        make[embedded]()
    assert str(error.value).startswith(f"field: got {told}")


@pytest.mark.parametrize(
    "given", [{"default": BIG}, {"examples": [0.1 + 0.2]}, {"minProperties": 2, "required": ["a"]}]
)
def test_what_it_does_not_read_is_not_refused(given):
    assert json.loads(schema(given).text) == given


def test_a_comment_is_no_schema():
    assert lark('start: "a" // as %json has it').kind == "lark"


def test_the_limits_of_schemas_are_those_of_schemas_in_lark():
    wide = json.dumps({"enum": list(range(5000))})
    with pytest.raises(ValueError, match="^field: got a schema of more than 4096 values"):
        lark(f"start: %json {wide}", "field")


def accepted(grammar: GrammarSource, text: str) -> bool:
    matcher = text_matcher(grammar.for_library())
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def plain(number: float) -> str:
    text = format(Decimal(repr(number)), "f")
    return text.rstrip("0").removesuffix(".") if "." in text else text


def test_every_number_that_is_taken_is_the_one_that_was_given():
    """By the texts that the library accepts for a ``const``: the number itself, and not its neighbours."""
    chance, taken = random.Random(1), 0
    for _ in range(400):
        if chance.random() < 0.5:
            number: float = chance.choice((1, -1)) * int(2 ** chance.uniform(0, 64))
        else:
            digits = chance.randrange(1, 19)
            number = float(f"{chance.choice(('', '-'))}{chance.randrange(10**digits)}e{chance.randrange(-26, 24)}")
        try:
            grammar = schema({"const": number})
        except ValueError:
            assert isinstance(number, float) or abs(number) > 2**53
            continue
        taken += 1
        assert accepted(grammar, plain(number))
        if isinstance(number, int):
            assert not accepted(grammar, str(number + 1)) and not accepted(grammar, str(number - 1))
    assert taken > 150


AMBIGUOUS = [
    {"properties": {"ab": {}}, "patternProperties": {"^a": {}}},
    {"required": ["x-a"], "patternProperties": {"^x-": {}}},
    {"allOf": [{"properties": {"ab": {}}}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"patternProperties": {"b$": {}}}}},
    {"items": {"anyOf": [{"properties": {"é\n": {}}}, {"patternProperties": {r"\n": {}}}]}},
    {"$ref": "#/properties/a~1b", "properties": {"a/b": {"patternProperties": {"b": {}}}}},
]
CLEAR = [
    {"properties": {"ab": {}}, "patternProperties": {"^b": {}}},
    {"properties": {"map": {"patternProperties": {".*": {}}}}},
    {"properties": {"properties": {}, "patternProperties": {"type": "object"}}},
]


@pytest.mark.parametrize("given", AMBIGUOUS)
def test_a_pattern_of_what_is_listed_is_refused(given):
    for made in (schema(given), lark(f"start: %json {json.dumps(given)}")):
        with pytest.raises(ValueError, match="^field: .* matches .*, which is listed for the same object"):
            check_source(made, "field")


@pytest.mark.parametrize("given", CLEAR)
def test_other_patterns_are_not(given):
    check_source(schema(given))


CONTROLS = [
    '^[^"]*$',
    r"^[^/\\]+$",
    r"[\u0000-\u001f]",
    r"\p{Cc}",
    '^[^\\n"]$',
    r"^a[b]\[[^\]\\]*$",
    '^[^a-z&&[^x]]|[^"]$',
]
KEPT = [r'^[^"\u0000]*$', r"^[^/\\\r\n]+$", "^[^a-z]+$", r"^\[[^\]]*\]$", r"^\P{L}*$", "[]a]", r"\\p"]


@pytest.mark.parametrize("pattern", CONTROLS)
def test_a_class_to_which_the_library_adds_a_quote_is_refused(pattern):
    for given in ({"type": "string", "pattern": pattern}, {"type": "object", "patternProperties": {pattern: {}}}):
        for made in (schema({"items": given}), lark(f"start: %json {json.dumps(given)}")):
            with pytest.raises(ValueError, match=r"^field: .* would match .* as well, unless it leaves .u0000 out"):
                check_source(made, "field")


@pytest.mark.parametrize("pattern", KEPT)
def test_other_classes_match_what_they_should(pattern):
    made = schema({"type": "string", "pattern": pattern})
    check_source(made)
    for character in '"\\a/]\n[é':
        read = pattern.replace(r"\P{L}", r"[^\W\d_]").replace(r"[^\W\d_]*", r"\W*")
        assert accepted(made, json.dumps(character, ensure_ascii=False)) == bool(re.search(read, character))


@pytest.mark.parametrize(
    "value", [{1, 2}, object(), Decimal(1), 10**5000, float("nan")], ids=lambda value: type(value).__name__
)
def test_what_json_cannot_write_is_refused_by_name(value):
    for given in ({"const": value}, {"default": value}):
        with pytest.raises(ValueError, match="^field: got "):
            schema(given, "field")
