"""Files with one entry changed: whatever stands in it, there is a working object or one clear error."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

REMOVED = object()
# What an entry becomes, by name.
VALUES: Mapping[str, Any] = {
    "0": 0, "-1": -1, "null": None, "2^31": 2**31, "2^62": 2**62, "2^63": 2**63, "list": [1, 2], "text": "abc",
    "object": {"a": 1}, "fraction": 0.5, "NaN": float("nan"), "true": True, "empty list": [], "removed": REMOVED,
}  # fmt: skip
DAILY = ("0", "-1", "null", "2^63", "list", "text", "removed")
MOST_SECONDS = 30


def entries(config: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The paths of all entries, those of objects within it, too."""
    for name, value in config.items():
        yield (name,)
        if isinstance(value, Mapping):
            yield from ((name, *rest) for rest in entries(value))


def changed(config: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Returns ``config`` with another value at ``path``, whose objects are made where there are none."""
    whole = at = copy.deepcopy({**config})
    for name in path[:-1]:
        at = at.setdefault(name, {})
    if value is REMOVED:
        at.pop(path[-1], None)
    else:
        at[path[-1]] = value
    return whole


def outcome(call: Callable[[], object], *begins: str) -> str | None:
    """Returns what is wrong with the way in which ``call`` ends; None: it works, or raises a ValueError or an OSError
    of moderate length that begins with one of ``begins``, and takes seconds."""
    try:
        with _alarm():
            call()
    except (ValueError, OSError) as error:
        told = str(error)
        fits = type(error) in (ValueError, OSError) and told.startswith(begins) and len(told) < 1000
        return None if fits else f"{type(error).__name__}: {told[:200]}"
    except Exception as error:
        return f"a trace of {type(error).__name__}: {str(error)[:200]}"
    return None


@contextmanager
def _alarm() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"more than {MOST_SECONDS} s")  # an OSError whose text begins with no argument

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
