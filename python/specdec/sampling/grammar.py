"""Grammars that texts must obey, compiled for one tokenizer by llguidance (extra ``specdec-kernels[grammar]``)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ..checks import refuse
from .grammar_source import GrammarSource

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_KEPT = 64  # compiled grammars of a compiler
# What a grammar, and then each mask, may cost. The library's own bounds allow ten times as much.
_LEXER_FUEL, _LEXER_STATES, _GRAMMAR_SIZE = 500_000, 50_000, 100_000


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar, for ``Request.grammar``. Any number of texts may have it at one time.

    Attributes:
        source: what was compiled.
        vocab_size: V of the model, the padding of its vocabulary included.
        eos: the end-of-sequence tokens. They are allowed where a text may end, and where it must end nothing else is.
    """

    source: GrammarSource
    vocab_size: int
    eos: frozenset[int]
    _matcher: LLMatcher

    def matcher(self) -> LLMatcher:
        """Returns the state before the first token of a text, which is that text's own."""
        return self._matcher.deep_copy()


class GrammarCompiler:
    """Compiles grammars for a model and its tokenizer. Threads may share it, and it keeps the last grammars. Making it
    takes no time; the first grammar takes about a second, in which the library reads the vocabulary.

    Args:
        tokenizer: the target's, a fast one.
        vocab_size: V of the target.
        eos: its end-of-sequence tokens, at least one, since they end a text.

    Raises:
        ValueError: names the argument, or the package that is missing.

    Example:
        >>> from specdec import GrammarSource, SpeculativeDecoder, load_embedded_pair
        >>> target, draft, tokenizer = load_embedded_pair()
        >>> decoder, prompt = SpeculativeDecoder(target, draft), tokenizer("answer = ").input_ids
        >>> grammar = decoder.grammar_compiler(tokenizer).compile(GrammarSource.choice(["yes", "no"]))
        >>> result = decoder.generate([prompt], grammar=grammar)
        >>> tokenizer.decode(result.tokens[0], skip_special_tokens=True) in ("yes", "no"), str(result.finish_reason[0])
        (True, 'eos')
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos: Iterable[int]):
        check_installed()
        self.vocab_size, self.eos = vocab_size, frozenset(eos)
        if not getattr(tokenizer, "is_fast", False):
            refuse("tokenizer", f"a {type(tokenizer).__name__}", "for grammars a fast tokenizer")
        if not self.eos:
            refuse("eos_token_id", "none", "for grammars one or more: they end a text")
        self._tokenizer, self._lock = tokenizer, threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled = functools.lru_cache(_KEPT)(self._compile)

    def compile(self, source: GrammarSource, name: str = "grammar") -> Grammar:
        """Returns the grammar, compiled with the mask of its first token, or one that was compiled before.

        Args:
            name: what errors call it.

        Raises:
            ValueError: the library cannot hold it. The message has its words.
        """
        try:
            return self._compiled(source)
        except _NotHeld as error:
            raise ValueError(f"{name}: {error}") from None

    def _compile(self, source: GrammarSource) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        try:
            text = source.for_library()
            limits = LLParserLimits(
                initial_lexer_fuel=_LEXER_FUEL,
                max_lexer_states=_LEXER_STATES,
                max_grammar_size=_GRAMMAR_SIZE,
                verbose_errors=False,
            )
            matcher = LLMatcher(self._read_vocabulary(), text, log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()  # much of the work is done here
        except ValueError as error:
            raise _NotHeld(f"llguidance cannot hold it: {one_line(str(error))}") from error
        if matcher.is_error():
            raise _NotHeld(f"llguidance cannot hold it: {one_line(matcher.get_error())}")
        return Grammar(source, self.vocab_size, self.eos, matcher)

    def _read_vocabulary(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._vocabulary is None:
                tokenizer, eos = cast("PreTrainedTokenizerFast", self._tokenizer), sorted(self.eos)
                self._vocabulary = from_tokenizer(tokenizer, n_vocab=self.vocab_size, eos_token=eos)
            return self._vocabulary


class _NotHeld(Exception):
    """Why the library cannot hold a grammar."""


def check_installed() -> None:
    """Raises ValueError if the library is missing."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        refuse("grammar", "one without the package llguidance", "after pip install 'specdec-kernels[grammar]'")


def check_source(source: GrammarSource, name: str = "grammar") -> None:
    """Raises ValueError with the library's words if it cannot hold a grammar whatever the tokenizer is."""
    check_installed()
    from llguidance import LLMatcher

    try:
        words = LLMatcher.validate_grammar(source.for_library())
    except ValueError as error:
        words = str(error)
    if words and not words.startswith("WARNING"):
        raise ValueError(f"{name}: llguidance cannot hold it: {one_line(words)}")


def one_line(words: str) -> str:
    """The library's words as a part of an error message."""
    line = " ".join(words.split())
    return line if len(line) <= 300 else line[:297] + "..."
