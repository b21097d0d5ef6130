"""Grammars that texts must obey, compiled for one tokenizer by llguidance (extra ``specdec-kernels[grammar]``)."""

from __future__ import annotations

import copy
import functools
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ..checks import one_line, refuse
from .grammar_limits import library_limits
from .grammar_source import GrammarSource
from .grammar_trials import GrammarTrials, Verdict, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_KEPT, _KEPT_BYTES = 64, 256 << 20  # compiled grammars of a compiler, and what they took


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
    """Compiles grammars for a model and its tokenizer. Threads may share it, and it keeps the last grammars. Each is
    tried in another process first, within limits of time, memory and depth, since some end the process that compiles
    them. Making it takes no time; the first grammar takes about a second, in which both processes read the vocabulary.

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
        self._tokenizer, self._lock, self._reading = tokenizer, threading.Lock(), threading.Lock()
        self._read: LLTokenizer | None = None
        self._trials = GrammarTrials(self._vocabulary)
        self._grammars = OrderedDict[GrammarSource, tuple[Grammar, int]]()

    def compile(self, source: GrammarSource, name: str = "grammar") -> Grammar:
        """Returns the grammar, compiled with the mask of its first token, or one that was compiled before. It is tried
        in another process first, which it may end.

        Args:
            name: what errors call it.

        Raises:
            ValueError: the library cannot hold it, within limits of time, memory and depth. The message has its words.
        """
        if (kept := self.kept(source)) is not None:
            return kept
        trial = self.trial(source, name)
        self._read_vocabulary()  # while the other process reads it, too
        return self.tried(source, trial.result(), name)

    def kept(self, source: GrammarSource) -> Grammar | None:
        """Returns one that was compiled before."""
        with self._lock:
            if (kept := self._grammars.get(source)) is None:
                return None
            self._grammars.move_to_end(source)
            return kept[0]

    def trial(self, source: GrammarSource, name: str = "grammar") -> Future[Verdict]:
        """The first half of ``compile``, for those who would rather wait otherwise. Cancelling it saves the work."""
        try:
            return self._trials.submit(source.for_library())
        except ValueError as error:
            raise _not_held(name, str(error)) from error

    def tried(self, source: GrammarSource, verdict: Verdict, name: str = "grammar") -> Grammar:
        """The second half of ``compile``."""
        from llguidance import LLMatcher

        if verdict.words:
            raise _not_held(name, verdict.words)
        matcher = LLMatcher(self._read_vocabulary(), source.for_library(), log_level=0, limits=library_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # much of the work is done here
        if matcher.is_error():
            raise _not_held(name, matcher.get_error())
        grammar = Grammar(source, self.vocab_size, self.eos, matcher)
        with self._lock:
            self._grammars[source] = grammar, verdict.bytes
            while len(self._grammars) > _KEPT or sum(size for _, size in self._grammars.values()) > _KEPT_BYTES:
                self._grammars.popitem(last=False)
        return grammar

    def _vocabulary(self) -> Vocabulary:
        backend = copy.copy(cast("PreTrainedTokenizerFast", self._tokenizer).backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return Vocabulary(backend.to_str(), self.vocab_size, sorted(self.eos))

    def _read_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._reading:
            if self._read is None:
                text, size, eos = self._vocabulary()
                self._read = LLTokenizer(text, n_vocab=size, eos_token=eos)
            return self._read


def check_installed() -> None:
    """Raises ValueError if the library is missing."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        refuse("grammar", "one without the package llguidance", "after pip install 'specdec-kernels[grammar]'")


def check_source(source: GrammarSource, name: str = "grammar") -> None:
    """Raises ValueError with the library's words if it cannot hold a grammar whatever the tokenizer is. What would take
    long to tell, or too much, is left to ``GrammarCompiler``."""
    check_installed()
    try:
        verdict = _without_vocabulary().submit(source.for_library()).result()
    except ValueError as error:
        raise _not_held(name, str(error)) from error
    if verdict.words and not verdict.limit:
        raise _not_held(name, verdict.words)


@functools.cache
def _without_vocabulary() -> GrammarTrials:
    return GrammarTrials(None)


def _not_held(name: str, words: str) -> ValueError:
    return ValueError(f"{name}: llguidance cannot hold it: {words_of(words)}")


def words_of(told: str) -> str:
    """The library's words as a part of an error message."""
    return one_line(told.replace("<non-verbose/>", ""))
