"""What the entries of a file may be: tables of entries, numbers with their ranges, and the one check that reads them.
Files come from strangers, so their entries are checked before anything is made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from .checks import shown


class Field(Protocol):
    """What an entry may be, in words as a string."""

    def fits(self, value: Any) -> bool: ...


class Number(NamedTuple):
    low: float
    high: float
    whole: bool = True

    def __str__(self) -> str:
        return f"{'an integer' if self.whole else 'a number'} from {self.low} to {self.high}"

    def fits(self, value: Any) -> bool:
        kinds = int if self.whole else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and self.low <= value <= self.high


class Kind(NamedTuple):
    of: type
    words: str
    items: tuple[type, ...] = ()  # of a list

    def __str__(self) -> str:
        return self.words

    def fits(self, value: Any) -> bool:
        items = value if isinstance(value, list) else ()
        return isinstance(value, self.of) and all(type(item) in self.items for item in items)


MOST = 2**31 - 1
SIZE, HEADS, TOKENS = Number(1, 2**24), Number(1, 2**16), Number(1, MOST)
POSITIVE, NOT_NEGATIVE, EPSILON = (Number(low, high, whole=False) for low, high in ((1e-30, 1e30), (0, 1e30), (0, 1)))
TEXT, FLAG, OBJECT = Kind(str, "a text"), Kind(bool, "true or false"), Kind(dict, "an object")
TEXTS, NUMBERS = Kind(list, "a list of texts", (str,)), Kind(list, "a list of numbers", (int, float))


def wrong(said: Mapping[str, Any], allowed: Mapping[str, Field]) -> Iterator[tuple[str, str, str]]:
    """Yields (name, value, what it may be) of entries that are there and may not be what they are."""
    for name, value in said.items():
        if (field := allowed.get(name)) is not None and not field.fits(value):
            yield name, shown(value), str(field)
