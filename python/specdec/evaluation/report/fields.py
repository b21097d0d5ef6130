"""The fields of a JSON file, each of the type that it should have, or refused by its name."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ...checks import refuse, shown

HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of characters


def visible(text: str) -> str:
    """What cannot be seen, or moves other text around (control characters, zero-width ones, directions, halves of
    surrogate pairs), written as its number. Line feeds and tabs stay."""
    return "".join(f"U+{ord(c):04X}" if unicodedata.category(c) in HIDDEN and c not in "\n\t" else c for c in text)


class Fields:
    """An object of the file, and where it stands in it. What is absent or null is None, or empty."""

    def __init__(self, of: Mapping[str, Any], where: str):
        self.of, self.where = of, where

    def _name(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.of.get(key)
        if value is not None and not isinstance(value, Mapping):
            refuse_field(self._name(key), shown(value), "an object or null")
        return dict(value or {})

    def inner(self, key: str) -> Fields:
        return Fields(self.mapping(key), self._name(key))

    def _list(self, key: str) -> Sequence[Any]:
        value = self.of.get(key)
        if value is not None and not isinstance(value, list):
            refuse_field(self._name(key), shown(value), "a list or null")
        return value or []

    def objects(self, key: str) -> list[Fields]:
        found = []
        for i, value in enumerate(self._list(key)):
            if not isinstance(value, Mapping):
                refuse_field(f"{self._name(key)}[{i}]", shown(value), "an object")
            found.append(Fields(value, f"{self._name(key)}[{i}]"))
        return found

    def number(self, key: str, most: float = math.inf) -> float | None:
        """From 0 to ``most``."""
        value = self.of.get(key)
        return None if value is None else _number(self._name(key), value, most)

    def numbers(self, key: str, most: float = math.inf) -> list[float]:
        return [_number(f"{self._name(key)}[{i}]", value, most) for i, value in enumerate(self._list(key))]

    def count(self, key: str, optional: bool = False) -> int | None:
        value = self.of.get(key)
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            refuse_field(self._name(key), shown(value), "an integer >= 0" + " or null" * optional)
        return value

    def text(self, key: str, optional: bool = False) -> str | None:
        value = self.of.get(key)
        if value is None and optional:
            return None
        if not isinstance(value, str):
            refuse_field(self._name(key), shown(value), "a string" + " or null" * optional)
        return value

    def texts(self, key: str) -> list[str]:
        values = self._list(key)
        for i, value in enumerate(values):
            if not isinstance(value, str):
                refuse_field(f"{self._name(key)}[{i}]", shown(value), "a string")
        return list(values)


def _number(where: str, value: object, most: float) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value <= most:
        return float(value)
    upper = "" if most == math.inf else f" and <= {most:g}"
    refuse_field(where, shown(value), f"a finite number >= 0{upper}, or null")


def refuse_field(where: str, given: str, allowed: str) -> NoReturn:
    refuse("results", f"{where} = {given}", f"{allowed} there")
