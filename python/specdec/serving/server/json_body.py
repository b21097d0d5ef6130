"""JSON of a request as it has to be before a route sees it."""

from __future__ import annotations

import json
import math
from typing import Any

from ...sampling.schema_checks import Written, inside
from .errors import ApiError

MAX_DEPTH = 32
_INTEGERS = range(-(2**63), 2**64)


def check_json(body: bytes) -> None:
    """Refuses what parsers read differently, and what is made to cost more than it weighs: other encodings than UTF-8,
    names that occur twice, NaN and Infinity, numbers that 64 bits do not keep, lone surrogates, and deep nesting.

    Raises:
        ApiError: 400; says what is wrong, but not with words of the body.
    """
    try:
        value = json.loads(
            body.decode(), object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_integer
        )
        json.dumps(value, ensure_ascii=False).encode()
    except ApiError:
        raise
    except UnicodeDecodeError:
        raise _refused("its encoding is not UTF-8") from None
    except UnicodeEncodeError:
        raise _refused("a string has half of a surrogate pair") from None
    except json.JSONDecodeError as error:
        raise _refused(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _too_deep() from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in inside(each)]
    if level:
        raise _too_deep()


def _refused(what: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON for this server: {what}", "invalid_json")


def _too_deep() -> ApiError:
    return _refused(f"more than {MAX_DEPTH} levels of nesting")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _refused("a name occurs twice in one object")
    return found


def _constant(name: str) -> None:
    raise _refused(f"{name} is no number of JSON")


def _float(digits: str) -> float:
    value = Written(digits)
    if math.isinf(value):
        raise _refused("a number is beyond the range of float64")
    # Some languages write 17 digits of every number, of which the last ones say no more than which float64 it is.
    many = len(digits.lower().partition("e")[0].replace(".", "").strip("-0")) > 17
    if (many or value == 0) and not value.is_exact:
        raise _refused("a number has more digits than a float64 keeps")
    return value


def _integer(digits: str) -> int:
    if len(digits) > 20 or int(digits) not in _INTEGERS:
        raise _refused("an integer has more than 64 bits")
    return int(digits)
