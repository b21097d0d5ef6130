"""Runs a job: prompts from a file through a scheduler, results into another file in the order in which texts end."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import cast

from transformers import PreTrainedTokenizerBase

from ..generate import next_seed
from ..loop.request import Request
from ..loop.sequence import SequenceState
from ..sampling.grammar import Grammar, GrammarCompiler
from ..sampling.grammar_source import GrammarSource
from ..serving.scheduler import Scheduler
from ..stopping import StopStrings
from .lines import JobLine
from .output import COUNTS, COUNTS_BY_POSITION, Results, Totals
from .result_line import result_line
from .signals import Signals


class RequestMaker:
    """Makes requests of the lines of a file.

    Args:
        tokenizer: the target's.
        banned: ids that no text may have, beside those of its line.
        grammar_compiler: makes the target's, for lines with grammars.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        banned: Sequence[int],
        grammar_compiler: Callable[[PreTrainedTokenizerBase], GrammarCompiler],
    ):
        self._tokenizer, self._banned = tokenizer, banned
        self._compiler = functools.cache(lambda: grammar_compiler(tokenizer))
        # A StopStrings remembers the texts of tokens, so lines share it.
        self._stop = functools.lru_cache(maxsize=64)(lambda strings: StopStrings(tokenizer, strings))

    def __call__(self, line: JobLine, further: int = 0) -> Request:
        """The request of a line, or of a further text of it. Its ``id`` is the line."""
        request, stop, source = line.settings.request, line.settings.stop, line.settings.grammar
        return replace(
            request,
            prompt=line.tokens(self._tokenizer),
            seed=next_seed(request.seed, further),
            stop=self._stop(stop) if stop else None,
            banned_tokens=[*request.banned_tokens, *self._banned],
            grammar=None if source is None else self._grammar(source),
            id=line,
        )

    def _grammar(self, source: GrammarSource) -> Grammar | ValueError:
        """One that cannot be had fails its line alone."""
        try:
            return self._compiler().compile(source, source.kind)
        except ValueError as error:
            return error


def decode_lines(
    scheduler: Scheduler, lines: Iterable[JobLine], tokenizer: PreTrainedTokenizerBase, make: RequestMaker
) -> Iterator[dict]:
    """Yields the results of lines, in the order in which their texts end. ``make`` makes the requests of lines."""
    for decoded in scheduler.run(make(line) for line in lines):
        yield result_of(decoded, tokenizer)


def write_results(rows: Iterable[dict], results: Results, signals: Signals, show: Callable[[dict], None]) -> None:
    """Writes each result as it comes.

    Args:
        show: called with every result, after it was written.

    Raises:
        Stopped: by a signal. WriteError: the disk is full. In each case the results so far are in the file.
    """
    for row in rows:
        with signals.held():
            results.append(row)
        show(row)
    results.sync()


def result_of(decoded: SequenceState, tokenizer: PreTrainedTokenizerBase) -> dict:
    """The line of an output file. It depends on the prompt and its settings alone, not on when it ran or beside which
    others, so it has no forwards and times, which prompts share."""
    counts = {name: getattr(decoded.stats, name) for name in (*COUNTS, *COUNTS_BY_POSITION)}
    return result_line(cast(JobLine, decoded.request.id), decoded, counts, tokenizer)


class Speed:
    """The speed of this process alone; ``totals`` count the results of earlier ones as well."""

    def __init__(self, totals: Totals):
        self._began, self._emitted = time.monotonic(), totals.emitted

    def describe(self, totals: Totals) -> str:
        """``totals``: of all results so far."""
        seconds = time.monotonic() - self._began
        speed = (totals.emitted - self._emitted) / seconds if seconds else 0.0
        return f"{speed:.1f} tokens/s, acceptance rate {totals.acceptance_rate:.2f}"
