"""What a JSON Schema is refused for before the library compiles it: what would cost too much, and what the library
takes and then does not keep."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from ..checks import refuse
from .grammar_limits import check_repeats

_DEEPEST, _MOST_VALUES = 64, 4_096  # compiling takes the square of the number of properties
_OWN = "x-guidance"  # by this key the library is told how to read a schema, so it is no sender's
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_IN_PLACE = ("allOf", "anyOf", "oneOf")
# What begins and ends a class, in which a bracket is none at first; other escapes are passed by.
_OF_CLASSES = re.compile(r"\\[pP](?:\{[^}]*\}|.)|\\.|\[\^?\]?|\]", re.DOTALL)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


class Written(float):
    """A number with the digits in which it was written."""

    text: str

    def __new__(cls, text: str) -> Written:
        number = super().__new__(cls, text)
        number.text = text
        return number

    @property
    def is_exact(self) -> bool:
        """Whether the shortest digits of this float64 are those that were written."""
        try:
            return math.isfinite(self) and Decimal(self.text) == Decimal(repr(float(self)))
        except ArithmeticError:  # an exponent beyond those of decimals
            return False


def read_schema(text: str) -> Any:
    """``json.loads``, with numbers as they were written. Raises ValueError or RecursionError."""
    return json.loads(text, parse_float=Written)


def check_schema(name: str, schema: object) -> None:
    """Raises ValueError, beginning with ``name``, which says what a schema may not have."""
    level, count, depth = [schema], 1, 0  # values of one depth, those so far, and the depth
    while level:
        if depth > _DEEPEST:
            refuse(name, f"a schema nested more than {_DEEPEST} deep", f"up to {_DEEPEST}")
        if count > _MOST_VALUES:
            refuse(name, f"a schema of more than {_MOST_VALUES} values", f"up to {_MOST_VALUES}")
        for each in level:
            if isinstance(each, Mapping):
                _check_keywords(name, each)
        level = [value for each in level for value in inside(each)]
        count, depth = count + len(level), depth + 1


def _check_keywords(name: str, schema: Mapping[str, Any]) -> None:
    for pattern in _patterns(schema):
        check_repeats(name, pattern)
    if _OWN in schema:
        refuse(name, f'the keyword "{_OWN}"', "keywords of JSON Schema")
    for keyword in ("const", "enum", *_BOUNDS):
        for number in _numbers(schema[keyword]) if keyword in schema else ():
            if not _is_kept(number):
                allowed = "integers up to 2^53, others of up to 15 digits and 22 places: the library rounds the rest"
                refuse(name, f"{keyword} with {_digits(number):.60}", allowed)
    required = schema.get("required")
    least, listed = schema.get("minProperties"), len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, (int, float)) and least > listed + 1:
        allowed = f"up to {listed + 1}, those that are required and one more: the library may write one key twice"
        refuse(name, f"minProperties {least}", allowed)


def _patterns(schema: Mapping[str, Any]) -> Iterator[str]:
    found = schema.get("pattern"), *_keys(schema.get("patternProperties"))
    return (pattern for pattern in found if isinstance(pattern, str))


def _numbers(value: object) -> Iterator[int | float]:
    level = [value]
    while level:
        yield from (each for each in level if isinstance(each, (int, float)))
        level = [inner for each in level for inner in inside(each)]


def _digits(number: int | float) -> str:
    if isinstance(number, int) and number.bit_length() > 256:  # of many thousand digits, Python writes none
        return f"an integer of {number.bit_length()} bits"
    return str(getattr(number, "text", number))


def _is_kept(number: int | float) -> bool:
    """Whether the library, which reads digits as a float64 and multiplies it by a power of ten, has the number as it
    was written."""
    if isinstance(number, int):
        return abs(number) <= 2**53
    if not math.isfinite(number) or isinstance(number, Written) and not number.is_exact:
        return False
    _, digits, exponent = Decimal(repr(float(number))).as_tuple()
    return int("".join(map(str, digits))) <= 2**53 and -22 <= int(exponent) <= 22


def inside(value: object) -> Iterable[Any]:
    """The values that stand in one of JSON."""
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()


def _keys(value: object) -> Iterable[object]:
    return value if isinstance(value, Mapping) else ()


def patterns_beside_names(root: Any) -> Iterator[tuple[str, str]]:
    """Yields what ``patternProperties`` may match, and a name that is listed for the same object, by the schema itself
    or by one that applies to the same value."""
    level, seen = [root], set[tuple[str, str]]()
    while level:
        for each in level:
            if isinstance(each, Mapping):
                names, patterns = _of_one_object(each, root)
                new = {(pattern, name) for pattern in patterns for name in names} - seen
                seen |= new
                yield from sorted(new)
        level = [part for each in level for part in _parts(each)]


def patterns_of(root: object) -> Iterator[str]:
    """Yields the regular expressions of a schema."""
    level = [root]
    while level:
        for each in level:
            if isinstance(each, Mapping):
                yield from _patterns(each)
        level = [part for each in level for part in _parts(each)]


def classes_in(regex: str) -> Iterator[str]:
    """Yields the classes of characters: those in brackets, and those of Unicode."""
    depth = start = 0
    for found in _OF_CLASSES.finditer(regex):
        opens, closes = found[0].startswith("["), found[0] == "]" and depth > 0
        if depth == 0:
            start = found.start()
        depth += opens - closes
        if depth == 0 and (closes or found[0].startswith(("\\p", "\\P"))):
            yield regex[start : found.end()]


def _parts(schema: object) -> Iterator[Any]:
    """What stands in a schema, where a map of schemas is none itself."""
    if not isinstance(schema, Mapping):
        return (yield from inside(schema))
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, Mapping):
            yield from value.values()
        else:
            yield value


def _of_one_object(schema: Any, root: Any) -> tuple[set[str], set[str]]:
    names, patterns = set[str](), set[str]()
    unread, read = [schema], set[int]()
    while unread:
        each = unread.pop()
        if id(each) in read or not isinstance(each, Mapping):
            continue
        read.add(id(each))
        names |= {name for key in ("properties", "required") for name in _inner_names(each.get(key))}
        patterns |= {*map(str, _keys(each.get("patternProperties")))}
        unread += [inner for key in _IN_PLACE for inner in inside(each.get(key))]
        if isinstance(reference := each.get("$ref"), str):
            unread.append(_referred(reference, root))
    return names, patterns


def _inner_names(value: object) -> Iterable[str]:
    return (name for name in value if isinstance(name, str)) if isinstance(value, (Mapping, list)) else ()


def _referred(reference: str, root: Any) -> Any:
    """What a reference within the schema names; another one is the whole schema, where it may be."""
    found: Any = root
    path, *steps = unquote(reference).split("/")
    for step in steps if path == "#" else ():
        key = step.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else found[int(key)] if _is_index(found, key) else None
    return found


def _is_index(value: object, key: str) -> bool:
    return isinstance(value, list) and key.isascii() and key.isdecimal() and int(key) < len(value)


def schemas_in(grammar: str) -> Iterator[Any]:
    """Yields the schemas in a grammar of the library: the parts of its JSON, and what follows ``%json`` in Lark. What
    is no JSON is left out: the library refuses it in its own words, or it stands in a comment."""
    if not grammar.lstrip().startswith("{"):
        return (yield from _of_lark(grammar))
    try:
        parts = read_schema(grammar).get("grammars")
    except (ValueError, RecursionError):
        return
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, Mapping):
            if "json_schema" in part:
                yield part["json_schema"]
            if isinstance(lark := part.get("lark_grammar"), str):
                yield from _of_lark(lark)


def _of_lark(lark: str) -> Iterator[Any]:
    reader = json.JSONDecoder(parse_float=Written)
    for part in lark.split("%json")[1:]:
        with contextlib.suppress(ValueError, RecursionError):
            yield reader.raw_decode(part.lstrip())[0]
