"""Grammars that fail in the middle of a text, as only bounds and faults of their library make them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

from specdec.sampling.grammar import Grammar, GrammarCompiler
from specdec.sampling.grammar_source import GrammarSource

from .grammars import END, tiny_grammar

LETTERS = ("a", "b", "c", "", "d")
OBJECT = GrammarSource.json_schema({"type": "object"})


class _Letters:
    eos_token_id, bos_token_id, special_token_ids = END, None, [END]
    tokens = [token.encode() or b"<end>" for token in LETTERS]

    def __call__(self, text: bytes | str) -> list[int]:
        return [LETTERS.index(character) for character in (text.decode() if isinstance(text, bytes) else text)]


def with_matcher(grammar: Grammar, make: Callable[[], Any]) -> Grammar:
    """The same grammar with other states of its library."""
    made = copy.copy(grammar)
    object.__setattr__(made, "matcher", make)
    return made


def fails_after_ab_or_ac() -> Grammar:
    """For a model with the five tokens LETTERS. Which texts fail is in the text alone: after ``a`` there are more
    ways to go on than the library is given places for, once another letter shows that ``a`` has ended."""
    from llguidance import LLTokenizer, TokenizerWrapper

    ways = "efghijklmnop"
    rules = [f'{way}: (B | C)* "d"' for way in ways]
    text = "\n".join(["start: (B | C)* (A x)?", f"x: {' | '.join(ways)}", *rules, "A: /a+/", 'B: "b"', 'C: "c"'])
    return with_matcher(tiny_grammar(), _limited(LLTokenizer(TokenizerWrapper(_Letters())), text, 16))


def fails_in_an_object(grammar: Grammar, tokenizer: Any) -> Grammar:
    """That of OBJECT, which now fails after its first brace."""
    from llguidance.hf import from_tokenizer

    vocabulary = from_tokenizer(tokenizer, n_vocab=grammar.vocab_size, eos_token=sorted(grammar.eos))
    return with_matcher(grammar, _limited(vocabulary, OBJECT.for_library(), 1))


def let_objects_fail(monkeypatch, tokenizer: Any) -> None:
    """What is compiled from OBJECT fails after its first brace."""

    def failing(own: Callable) -> Callable:
        def called(self, source, *more):
            grammar = own(self, source, *more)
            return grammar if grammar is None or source.text != OBJECT.text else fails_in_an_object(grammar, tokenizer)

        return called

    for name in ("tried", "kept"):
        monkeypatch.setattr(GrammarCompiler, name, failing(getattr(GrammarCompiler, name)))


def _limited(vocabulary: Any, text: str, items: int) -> Callable[[], Any]:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_items_in_row=items, verbose_errors=False)
    matcher = LLMatcher(vocabulary, text, log_level=0, limits=limits)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.deep_copy


class PanicException(BaseException):
    """As PyO3 raises it for a panic of a library in Rust, which is no ``Exception``."""


def panic(*arguments: object) -> None:
    raise PanicException("index out of bounds: the len is 0 but the index is 0")


def panics(monkeypatch, grammar: Grammar, *functions: str, only: int | None = None) -> Grammar:
    """Returns the same grammar, for whose states these functions of ``llguidance.numpy`` panic.

    Args:
        only: the number of the only call that panics, from 0; None: all do.
    """
    from llguidance import numpy as library

    matchers: list[Any] = []
    numbers = itertools.count()

    def make() -> Any:
        matchers.append(grammar.matcher())
        return matchers[-1]

    def panicking(own: Callable) -> Callable:
        def called(*arguments: Any) -> None:
            given = [each for x in arguments for each in (x if isinstance(x, list) else [x])]
            if any(matcher is (each[0] if isinstance(each, tuple) else each) for each in given for matcher in matchers):
                if only in (None, next(numbers)):
                    panic()
            own(*arguments)

        return called

    for name in functions:
        monkeypatch.setattr(library, name, panicking(getattr(library, name)))
    return with_matcher(grammar, make)
