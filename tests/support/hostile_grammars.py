"""Grammars within all limits of their texts that end a process which compiles them, or keep it busy: each with the
words in which it is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

from specdec.sampling.grammar_source import GrammarSource

DEEP, SLOW = "too deeply to be compiled", "it takes more than (2 s|256 MiB)"


def chain_of_references(length: int) -> GrammarSource:
    links = {str(i): {"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(length)}
    return GrammarSource.json_schema({"$defs": {**links, str(length): {"type": "null"}}, "$ref": "#/$defs/0"})


def chain_of_rules(length: int, name: str) -> GrammarSource:
    rules = (f"{name}{i}: {name}{i + 1}" for i in range(length))
    return GrammarSource.lark("\n".join((f"start: {name}0", *rules, f'{name}{length}: "x"')))


def patterns(count: int, salt: str = "") -> GrammarSource:
    of = ({"type": "string", "pattern": f"a.*b{salt}{i}"} for i in range(count))
    return GrammarSource.json_schema({"allOf": list(of)})


def properties(count: int) -> GrammarSource:
    return GrammarSource.json_schema(
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}
    )


def in_lark(schema: dict) -> GrammarSource:
    return GrammarSource.lark(f"start: %json {json.dumps(schema)}")


HOSTILE: dict[str, tuple[Callable[[], GrammarSource], str]] = {
    "references": (lambda: chain_of_references(1000), DEEP),
    "rules": (lambda: chain_of_rules(3000, "a"), DEEP),
    "terminals": (lambda: chain_of_rules(4500, "A"), DEEP),
    "patterns": (lambda: patterns(24), SLOW),
    "patterns in lark": (lambda: in_lark(json.loads(patterns(24).text)), SLOW),
    "multiples": (lambda: GrammarSource.json_schema({"type": "integer", "multipleOf": 2**31}), SLOW),
    "options": (lambda: GrammarSource.regex("a?" * 20_000), SLOW),
    "more options": (
        lambda: GrammarSource.regex("".join(f"(a{i})?" for i in range(8000))),
        "too many expressions|takes",
    ),
    "repetitions": (lambda: GrammarSource.regex("".join(f".{{1,{i + 2}}}" for i in range(60))), "too many expressions"),
    "properties": (lambda: properties(1300), "Current row has"),
    "many properties": (lambda: properties(2000), "Current row has"),
}


def random_source(seed: int) -> GrammarSource:
    """Of any kind, deep, long, or both. Raises ValueError where its text is refused."""
    chance = random.Random(seed)
    kind = chance.choice(("schema", "regex", "lark", "references", "rules"))
    if kind == "schema":
        return GrammarSource.json_schema(_schema(chance, chance.randrange(30)))
    if kind == "regex":
        return GrammarSource.regex("".join(_regex(chance, chance.randrange(60))))
    if kind == "lark":
        rules = (f"r{i}: {_body(chance, i)}" for i in range(chance.choice((3, 30, 300))))
        return GrammarSource.lark("\n".join(("start: r0", *rules)))
    length = int(2 ** chance.uniform(2, 11.5))
    return (
        chain_of_references(min(length, 1000)) if kind == "references" else chain_of_rules(length, chance.choice("aA"))
    )


def _schema(chance: random.Random, depth: int) -> dict:
    if depth == 0:
        return chance.choice(
            ({"type": "integer"}, {"pattern": "a.*b"}, {"enum": [1, "x", None]}, {}, {"multipleOf": 0.5})
        )
    inner = _schema(chance, depth - 1)
    other = _schema(chance, chance.randrange(min(depth, 4)))
    return chance.choice(
        (
            {"type": "array", "items": inner, "maxItems": chance.choice((1, 5, 3000))},
            {"type": "object", "properties": {"a": inner, "b": other}, "additionalProperties": False},
            {"anyOf": [inner, other]},
            {"allOf": [inner, other]},
            {"type": "object", "patternProperties": {"^a": inner, "^b": other}},
            {"type": "array", "prefixItems": [other, inner]},
        )
    )


def _regex(chance: random.Random, depth: int) -> Iterator[str]:
    if depth == 0:
        yield chance.choice(("a", "[^b]", ".", "é", r"\w", ""))
        return
    yield "("
    yield from _regex(chance, depth - 1)
    yield chance.choice(("|b)", ")*", "){0,3}", "x)+", ")?c", "&b)", ".*)", ".*d){1,60}"))


def _body(chance: random.Random, at: int) -> str:
    words = (
        '"a"',
        "/[a-z]+/",
        f"r{at + 1}",
        f"r{max(0, at - 1)}",
        f'(r{at + 1} | "b")*',
        f"r{at + 1}{{2,9}}",
        '~"a"',
        "%json {}",
    )
    return " ".join(chance.choice(words) for _ in range(chance.randrange(1, 4)))
