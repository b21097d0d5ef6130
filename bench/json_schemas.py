"""JSON Schemas of the kinds that public suites have: objects in objects, enumerations, references, formats, bounds of
numbers and lengths, arrays. All are bounded, so that a text that obeys one ends."""

from __future__ import annotations

import itertools
from typing import Any

Schema = dict[str, Any]
VALUES: dict[str, Schema] = {
    "name": {"type": "string", "maxLength": 16},
    "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "colour": {"enum": ["red", "green", "blue"]},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "ratio": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
    "active": {"type": "boolean"},
    "day": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "date-time"},
    "id": {"type": "string", "format": "uuid"},
    "note": {"anyOf": [{"type": "null"}, {"type": "string", "minLength": 1, "maxLength": 12}]},
    "kind": {"const": "record"},
    "place": {"$ref": "#/$defs/place"},
    "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 3},
    "scores": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 4},
}


def closed(properties: dict[str, Schema], required: list[str] | None = None) -> Schema:
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


PLACE = closed({"city": {"type": "string", "maxLength": 12}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}})


def schemas(count: int) -> list[Schema]:
    """The first ``count`` of them, each another one: two to four properties in one of five shapes."""
    found: list[Schema] = []
    sizes = itertools.chain.from_iterable(zip(*(itertools.combinations(VALUES, n) for n in (2, 3, 4)), strict=False))
    for i, names in enumerate(sizes):
        inner = closed({name: VALUES[name] for name in names}, None if i % 2 else list(names[:1]))
        shapes = (
            inner,
            closed({"first": inner, "second": {"type": "boolean"}}),
            {"type": "array", "items": inner, "minItems": 1, "maxItems": 2},
            closed({"value": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, inner]}}),
            closed({"outer": closed({"middle": inner})}),
        )
        found.append({"$defs": {"place": PLACE}, **shapes[i % len(shapes)]})
        if len(found) == count:
            return found
    raise ValueError(f"count: got {count}, allowed: up to {len(found)}")
