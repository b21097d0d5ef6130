"""What grammars may cost, and what their texts are checked for before the library sees them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from ..checks import refuse

if TYPE_CHECKING:
    from llguidance import LLParserLimits

LONGEST = 65_536  # characters of a grammar
MEMORY_BYTES = 256 << 20  # that a grammar may take when it is tried in another process
SECONDS = 20.0  # that this may take on a machine with other things to do
_MOST_REPEATS = 4_096  # of a regex, where repetitions within repetitions multiply


class Lane(NamedTuple):
    """What grammars may take there of the processor's time, and how far they stand back behind others."""

    cpu_seconds: float
    nice: int


# Usual grammars take some hundredths of a second. Those that need more than one lane gives wait in the next one.
LANES = (Lane(0.15, 5), Lane(0.5, 10), Lane(2.0, 19))


@functools.cache
def library_limits() -> LLParserLimits:
    """What a grammar, and then each mask, may cost. The library's own bounds allow ten times as much."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000, max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False
    )


def check_repeats(name: str, regex: str) -> str:
    if (repeats := _repeats(regex)) > _MOST_REPEATS:
        refuse(name, f"repetitions that multiply to {repeats}", f"up to {_MOST_REPEATS}")
    return regex


def _repeats(regex: str) -> int:
    """An upper bound of how often the counted repetitions of a regex, one in the other, repeat something."""
    most, groups, last, i = 1, [1], 1, 0
    while i < len(regex):
        character = regex[i]
        if character == "\\":
            last, i = 1, i + 1
        elif character == "[":
            end = regex.find("]", i + 2)
            last, i = 1, len(regex) if end < 0 else end
        elif character == "(":
            groups.append(1)
        elif character == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] = max(groups[-1], last)
        elif character == "{":
            inside, closed, _ = regex[i + 1 : i + 64].partition("}")
            numbers = [n.strip().lstrip("0")[:10] for n in inside.split(",") if n.strip().isdecimal() and n.isascii()]
            if not closed and inside[:1].isdigit():
                return _MOST_REPEATS + 1  # nobody writes a number of so many digits
            last *= max((int(n or 1) for n in numbers), default=1)
            groups[-1] = max(groups[-1], last)
            i += len(inside) + 1 if closed else 0
        elif character not in "*+?":
            last = 1
        most, i = max(most, groups[-1]), i + 1
    return most
