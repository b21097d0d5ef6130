"""transformers' list of logits processors, turned into parameters of the kernels where the kernels have these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor
from transformers.generation import logits_process as theirs

from specdec_kernels import SamplingParams

from ..sampling.grammar import Grammar
from ..sampling.params import LARGEST_BIAS
from ..sampling.processors import OfRow, refuse_stateful
from .grammar_processor import GrammarProcessor

# The kernels' order of temperature and filters, which is transformers'.
_WARPERS = (theirs.TemperatureLogitsWarper, theirs.TopKLogitsWarper, theirs.TopPLogitsWarper, theirs.MinPLogitsWarper)
# Those of transformers' own processors that look at which row of the batch they are called for.
_ROW_AWARE = (
    theirs.EncoderNoRepeatNGramLogitsProcessor,
    theirs.EncoderRepetitionPenaltyLogitsProcessor,
    theirs.PrefixConstrainedLogitsProcessor,
    theirs.RepetitionPenaltyLogitsProcessor,
)


@dataclass
class SamplingArguments:
    """The arguments of ``SpeculativeDecoder.generate`` that decide the distribution of the text."""

    params: SamplingParams | None = None
    logit_bias: dict[int, float] | None = None
    banned_tokens: list[int] = field(default_factory=list)
    min_new_tokens: int = 0
    logits_processor: list[list[LogitsProcessor]] | None = None  # for each sequence
    processor_prompts: list[list[int]] | None = None
    grammar: Grammar | None = None


def read_arguments(
    processors: Sequence[LogitsProcessor],
    rows: list[list[int]],
    do_sample: bool,
    eos: frozenset[int],
    max_new_tokens: int,
    vocab_size: int,
) -> SamplingArguments:
    """Arguments with the distribution of ``processors``, which run in this order.

    Temperature, top-k, top-p and min-p at the end of the list, in that order, become ``SamplingParams``. The processors
    before them become penalties, biases, bans and a shortest length, if all of them can be expressed in that way
    without changing their order (bans may stand anywhere). Otherwise all of them run as they are, row by row, on the
    text with its padding, as transformers shows it.

    Args:
        processors: as transformers' ``generate`` prepared them.
        rows: the prompts as transformers shows them, with their padding.
        do_sample: False is greedy; temperature and filters are then processors like others.
        eos: the ids that end a sequence.
        max_new_tokens: the most that a sequence gets.
        vocab_size: V of the target.

    Raises:
        ValueError: a processor keeps a state between its calls.
    """
    refuse_stateful(processors)
    start = _first_warper(processors) if do_sample else len(processors)
    rest, warpers = list(processors[:start]), processors[start:]
    native = _Native(rows, eos, vocab_size)
    if all(map(native.take, rest)):
        arguments = native.arguments
        arguments.min_new_tokens = min(arguments.min_new_tokens, max_new_tokens)
    else:
        each = [[_for_row(p, b, len(rows)) for p in rest] for b in range(len(rows))]
        arguments = SamplingArguments(logits_processor=each, processor_prompts=rows)
    filters = _read_warpers(warpers) if do_sample else {"temperature": 0.0}
    penalty = arguments.params.repetition_penalty if arguments.params is not None else None
    arguments.params = SamplingParams(**filters, repetition_penalty=penalty)
    return arguments


def _first_warper(processors: Sequence[LogitsProcessor]) -> int:
    """Index of the first of the temperature and filters at the end of the list that the kernels can take over."""
    start, rank = len(processors), len(_WARPERS)
    while start and type(processors[start - 1]) in _WARPERS[:rank] and _is_native(processors[start - 1]):
        start -= 1
        rank = _WARPERS.index(type(processors[start]))
    return start


def _is_native(warper: LogitsProcessor) -> bool:
    """Whether the kernels take its settings."""
    if getattr(warper, "filter_value", -math.inf) != -math.inf:
        return False
    if not isinstance(warper, theirs.TopKLogitsWarper) and getattr(warper, "min_tokens_to_keep", 1) != 1:
        return False
    return _allowed(**_read_warpers([warper]))


def _read_warpers(warpers: Sequence[LogitsProcessor]) -> dict[str, Any]:
    names = dict(zip(_WARPERS, ("temperature", "top_k", "top_p", "min_p"), strict=True))
    return {names[type(warper)]: getattr(warper, names[type(warper)]) for warper in warpers}


class _Native:
    """Adds processors to ``arguments`` of the kernels, one after the other."""

    def __init__(self, rows: list[list[int]], eos: frozenset[int], vocab_size: int):
        self.arguments = SamplingArguments()
        self._rows, self._length, self._eos, self._vocab_size = rows, len(rows[0]) if rows else 0, eos, vocab_size

    def take(self, p: Any) -> bool:
        """Returns whether the kernels can do what ``p`` does, after those before."""
        if type(p) in (theirs.SequenceBiasLogitsProcessor, theirs.NoBadWordsLogitsProcessor):
            return self._take_bias(p.sequence_bias)
        if type(p) is theirs.SuppressTokensLogitsProcessor:
            known = [token for token in p.suppress_tokens.tolist() if 0 <= token < self._vocab_size]
            self.arguments.banned_tokens += known
            return True
        if type(p) is theirs.RepetitionPenaltyLogitsProcessor:
            return self._take_penalty(p.penalty, _ignored(p.prompt_ignore_length, len(self._rows)))
        if type(p) is theirs.MinLengthLogitsProcessor:
            return self._take_shortest(p, p.min_length)
        if type(p) is theirs.MinNewTokensLengthLogitsProcessor:
            return self._take_shortest(p, p.min_new_tokens + p.prompt_length_to_skip)
        if type(p) is GrammarProcessor:
            return self._take_grammar(p)
        return False

    def _take_bias(self, sequence_bias: Any) -> bool:
        if any(len(tokens) > 1 or tokens[0] >= self._vocab_size for tokens in sequence_bias):
            return False
        bias = {int(tokens[0]): float(b) for tokens, b in sequence_bias.items()}
        self.arguments.banned_tokens += [token for token, b in bias.items() if b == -math.inf]
        bias = {token: b for token, b in bias.items() if b != -math.inf}
        # The kernels add one bias, before the penalty: a second sum would be rounded differently.
        if bias and (
            self._penalised or self.arguments.logit_bias or any(not abs(b) <= LARGEST_BIAS for b in bias.values())
        ):
            return False
        self.arguments.logit_bias = bias or self.arguments.logit_bias
        return True

    def _take_penalty(self, penalty: float, ignored: list[int]) -> bool:
        fits = len(ignored) == len(self._rows) and all(n <= self._length for n in ignored)
        if self._penalised or not fits or not _allowed(repetition_penalty=penalty):
            return False
        self.arguments.params = SamplingParams(repetition_penalty=penalty)
        self.arguments.processor_prompts = [row[n:] for row, n in zip(self._rows, ignored, strict=True)]
        return True

    def _take_shortest(self, p: Any, least: int) -> bool:
        """``least``: tokens of a row with its padding, before which none of the ends that ``p`` bans may come."""
        self.arguments.min_new_tokens = max(self.arguments.min_new_tokens, least - self._length)
        return {*p.eos_token_id.flatten().tolist()} == self._eos

    def _take_grammar(self, p: GrammarProcessor) -> bool:
        """It is read with the logits, before what else changes them, and all of that leaves -inf as it is."""
        fits = p.prompt_length == self._length and p.grammar.eos <= self._eos
        if self.arguments.grammar is not None or not fits or p.grammar.vocab_size != self._vocab_size:
            return False
        self.arguments.grammar = p.grammar
        return True

    @property
    def _penalised(self) -> bool:
        return self.arguments.params is not None


def _ignored(lengths: torch.Tensor | int | None, batch_size: int) -> list[int]:
    """How many of the first tokens the repetition penalty does not count, in each row."""
    if isinstance(lengths, torch.Tensor):
        return lengths.tolist()
    return [lengths or 0] * batch_size


def _allowed(**values: Any) -> bool:
    try:
        SamplingParams(**values)
    except ValueError:
        return False
    return True


def _for_row(processor: LogitsProcessor, row: int, batch_size: int) -> LogitsProcessor:
    """``processor`` for one row. One that may look at which row it is called for is shown a whole batch."""
    known = type(processor).__module__ == theirs.__name__ and type(processor) not in _ROW_AWARE
    return processor if known or batch_size == 1 else OfRow(processor, row, batch_size)
