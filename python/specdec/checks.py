"""Errors about arguments: they name the argument, what was given and what is allowed, or which settings have changed.
Imports nothing of specdec."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

T = TypeVar("T")


def refuse(name: str, given: object, allowed: str) -> NoReturn:
    """Raises ValueError about the argument ``name``."""
    raise ValueError(f"{name}: got {given}, allowed: {allowed}")


def shown(value: object) -> str:
    """``value`` for an error message: printable characters of one line, 60 at most."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def one_line(error: object, most: int = 300) -> str:
    """What an error of another library says, for a message: of one line, ``most`` characters at most."""
    text = " ".join(str(error).split())
    return text if len(text) <= most else text[: most - 3] + "..."


def read_count(name: str, value: int, smallest: int = 0) -> int:
    """Returns ``value`` if it is an integer >= ``smallest``. Raises ValueError naming ``name`` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        refuse(name, repr(value), f"an integer >= {smallest}")
    return value


def for_each(name: str, given: object, size: int, one: bool) -> list:
    """Returns ``given`` for each of ``size`` sequences.

    Args:
        one: whether it is a value for all of them; else it is a list or a tensor with one for each.

    Raises:
        ValueError: names ``name``; there is not one for each.
    """
    if one:
        return [given] * size
    values = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(values, Sequence) or len(values) != size:
        refuse(name, repr(given), f"one for all, or a list of {size}, one for each sequence")
    return list(values)


def is_failure(error: BaseException) -> bool:
    """Whether code failed, and was not told to end: panics of libraries in Rust are no ``Exception``."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def read_as(name: str, read: Callable[..., T], *arguments: object) -> T:
    """Returns ``read(*arguments)``. A ValueError about an argument is raised again under the caller's name for it,
    ``name``."""
    try:
        return read(*arguments)
    except ValueError as error:
        raise ValueError(f"{name}: {str(error).partition(': ')[2]}") from error


def differences(then: dict, now: dict) -> list[str]:
    """The settings that differ, each as "name: 4 then, 5 now"."""
    absent = object()
    return [
        f"{name}: {json.dumps(then.get(name))} then, {json.dumps(now.get(name))} now"
        for name in dict.fromkeys((*then, *now))
        if then.get(name, absent) != now.get(name, absent)
    ]
