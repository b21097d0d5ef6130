"""Runs a job: prompts from a file through a scheduler, results into another file in the order in which texts end."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from ..loop.sequence import Request
from ..result import FinishReason
from ..stopping import StoppingCriteria, StopStrings
from .lines import JobLine
from .output import COUNTS, COUNTS_BY_POSITION, Results
from .result_line import result_line
from .signals import Signals

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedTokenizerBase

    from ..loop.sequence import Sequence as Decoded


class Runner(Protocol):
    """The part of a scheduler that a job uses."""

    @property
    def drafter_error(self) -> str | None: ...

    def run(self, requests: Iterable[Request]) -> Iterator[Decoded]: ...


def run_job(
    scheduler: Runner,
    lines: Iterator[JobLine],
    results: Results,
    tokenizer: PreTrainedTokenizerBase,
    banned: Sequence[int],
    signals: Signals,
    show: Callable[[dict], None],
) -> str | None:
    """Runs the prompts that have no result yet.

    Args:
        lines: all lines of the input, checked.
        banned: ids that no text may have.
        show: called with the line of every result, after it was written.

    Returns:
        Why the drafter failed, if it did: then texts are right but come more slowly. None: it did not fail.

    Raises:
        Stopped: by a signal. WriteError: the disk is full. InputError: the input changed. In each case the results so
        far are in the file.
    """
    for decoded in scheduler.run(_requests(lines, results.done, tokenizer, banned)):
        row = result_of(decoded, tokenizer)
        with signals.held():
            results.append(row)
        show(row)
    results.sync()
    return scheduler.drafter_error


def _requests(
    lines: Iterator[JobLine], done: set[str | int], tokenizer: PreTrainedTokenizerBase, banned: Sequence[int]
) -> Iterator[Request]:
    @functools.lru_cache(maxsize=64)  # a StopStrings remembers the texts of tokens
    def stopping(strings: tuple[str, ...]) -> StoppingCriteria | None:
        return StopStrings(tokenizer, strings) if strings else None

    for line in lines:
        if line.id in done:
            continue
        s = line.settings
        yield Request(
            prompt=line.tokens(tokenizer),
            max_new_tokens=s.max_new_tokens,
            params=line.params,
            seed=s.seed,
            stop=stopping(s.stop),
            logit_bias=s.logit_bias,
            banned_tokens=[*s.banned_tokens, *banned],
            min_new_tokens=s.min_new_tokens,
            log_probs=s.log_probs,
            top_log_probs=s.top_log_probs,
            prompt_log_probs=s.prompt_log_probs,
            id=line,
        )


def result_of(sequence: Decoded, tokenizer: PreTrainedTokenizerBase) -> dict:
    """The line of an output file. It depends on the prompt and its settings alone, not on when it ran or beside which
    others, so it has no forwards and times, which prompts share.
    """
    counts = dataclasses.asdict(sequence.stats)
    return result_line(
        cast(JobLine, sequence.request.id),
        sequence.request.prompt,
        sequence.tokens,
        sequence.produced_by,
        sequence.finish_reason or FinishReason.FAILED,
        sequence.status,
        {name: counts[name] for name in (*COUNTS, *COUNTS_BY_POSITION)},
        tokenizer,
        sequence,
        sequence.error,
    )
