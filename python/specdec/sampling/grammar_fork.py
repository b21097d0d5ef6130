"""What becomes of one grammar in a process that may end of it: ``grammar_child.py`` forks it."""

from __future__ import annotations

import functools
import json
import os
import random
import resource
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from .grammar_limits import LANES, MEMORY_BYTES, SECONDS, Lane, library_limits
from .schema_checks import classes_in, patterns_beside_names, patterns_of, schemas_in

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Half of the smallest stack on which this grammar will be compiled and walked: the library's own threads have 2 MiB,
# those of Python what the process allows.
_STACK_BYTES = 1 << 20
_WALKS, _WALK_TOKENS = 4, 24  # of each grammar, as some fail only in the middle of a text
TOO_DEEP = "it nests, or refers from one part to the next, too deeply to be compiled"
# By the signal that ended the process. The kernel sends the last one where the machine has no memory left.
TOO_MUCH: dict[int, str] = {
    signal.SIGPROF: f"it takes more than {LANES[-1].cpu_seconds:g} s to compile",
    signal.SIGALRM: f"it was not compiled within {SECONDS:g} s, on a busy machine",
    signal.SIGABRT: f"it takes more than {MEMORY_BYTES >> 20} MiB to compile",
    signal.SIGKILL: f"it takes more than {MEMORY_BYTES >> 20} MiB to compile",
}


class Held(NamedTuple):
    mapped: int
    resident: int


def held() -> Held:
    """The bytes of this process; 0 where the system does not tell them so."""
    if not os.path.exists("/proc/self/statm"):
        return Held(0, 0)
    with open("/proc/self/statm") as file:
        pages = [int(number) for number in file.read().split()]
    return Held(pages[0] * resource.getpagesize(), pages[1] * resource.getpagesize())


def limit(limits: Lane, mapped: int) -> None:
    """What this process may cost. The kernel ends it at each of these."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # the library, and what ends the process, would write to the last one
        os.dup2(null, descriptor)
    os.nice(limits.nice)
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    threading.stack_size(_STACK_BYTES if stack == resource.RLIM_INFINITY else min(_STACK_BYTES, stack // 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if mapped:
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, mapped + MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)


def verdict(vocabulary: LLTokenizer | None, grammar: str) -> str:
    """Why a grammar cannot be had; "": it can."""
    from llguidance import LLMatcher

    try:
        for told in (*_ambiguous(grammar), *_unquoted(grammar)):
            return told
        if vocabulary is None:
            words = LLMatcher.validate_grammar(grammar, limits=library_limits())
            return "" if words.startswith("WARNING") else words
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=library_limits())
        return matcher.get_error() or _walked(matcher, vocabulary.eos_tokens)
    except MemoryError:
        return TOO_MUCH[signal.SIGABRT]
    except BaseException as error:  # the library's panics are no Exceptions
        return str(error) or type(error).__name__


def _ambiguous(grammar: str) -> Iterator[str]:
    """The library joins the schemas of a property that is listed, and matches a pattern as well, in a way that leaves
    some texts without an end."""
    for schema in schemas_in(grammar):
        for pattern, name in patterns_beside_names(schema):
            if _finds(pattern, name):
                yield f"patternProperties {pattern!r:.60} matches {name!r:.60}, which is listed for the same object"


def _unquoted(grammar: str) -> Iterator[str]:
    """Where a class of a pattern has all control characters, the library writes a quote and a backslash as well."""
    from llguidance import LLMatcher

    for part in {part for s in schemas_in(grammar) for pattern in patterns_of(s) for part in classes_in(pattern)}:
        plain = text_matcher(LLMatcher.grammar_from_regex(part))
        for character in '"\\' if not plain.is_error() else "":
            if _finds(f"^{part}$", character) and not plain.deep_copy().consume_tokens([ord(character)]):
                yield f"in a pattern, {part:.60} would match {character} as well, unless it leaves \\u0000 out"


def text_matcher(grammar: str) -> LLMatcher:
    """A grammar over an alphabet of bytes."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    return LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes())), grammar, log_level=0)


@functools.cache
def _pattern(pattern: str) -> LLMatcher:
    """What a pattern means to the library."""
    from llguidance import LLMatcher

    return text_matcher(LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern})))


class _Bytes:
    eos_token_id, bos_token_id, special_token_ids = 256, None, [256]
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _finds(pattern: str, name: str) -> bool:
    """Where the library does not know the pattern, it says so of the whole schema."""
    matcher = _pattern(pattern).deep_copy()
    text = json.dumps(name, ensure_ascii=False).encode("utf-8", "replace")
    return matcher.consume_tokens(list(text)) and matcher.is_accepting()


def _walked(matcher: LLMatcher, eos: list[int]) -> str:
    """The words of the library if it fails in the beginnings of some texts."""
    ends = sum(1 << token for token in {*eos})
    for walk in range(_WALKS):
        state, chance = matcher.deep_copy(), random.Random(walk)
        for _ in range(_WALK_TOKENS):
            if state.is_stopped():
                break
            allowed = int.from_bytes(state.compute_bitmask(), "little")
            if state.is_error() or not allowed:
                return state.get_error() or "it leaves no token"
            if not allowed & ~ends:
                break
            state.consume_token(_one_of(allowed & ~ends, chance))
        state.compute_ff_tokens()
        if state.is_error():
            return state.get_error()
    return ""


def _one_of(mask: int, chance: random.Random) -> int:
    """The place of a bit that is set, each as likely as the others."""
    bits = bin(mask)
    number, first, last = chance.randrange(bits.count("1")), 2, len(bits)
    while last - first > 1:
        middle = (first + last) // 2
        before = bits.count("1", first, middle)
        if number < before:
            last = middle
        else:
            number, first = number - before, middle
    return len(bits) - 1 - first
