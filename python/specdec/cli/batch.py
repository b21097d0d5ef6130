"""The texts of ``specdec generate``: lines are decoded in one batch if what must be the same for a whole batch is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from specdec_kernels import SamplingParams, Status

from ..decoder import SpeculativeDecoder
from ..jobs.lines import JobLine
from ..loop.sequence import Output
from ..result import FinishReason, GenerationResult, Producer, TokenLogProb
from ..stats import Stats
from ..stopping import StopStrings

T = TypeVar("T")


@dataclass(frozen=True)
class Text:
    """One text of a line."""

    line: JobLine
    prompt: list[int]
    tokens: list[int]
    produced_by: list[Producer]
    finish_reason: FinishReason
    status: Status
    stats: Stats  # its own counts, and the time of its whole batch
    log_probs: list[float] | None
    raw_log_probs: list[float] | None
    top_log_probs: list[TokenLogProb] | None
    prompt_log_probs: list[TokenLogProb | None] | None


@dataclass(frozen=True)
class Texts:
    """All texts, those of one line side by side."""

    texts: list[Text]
    stats: Stats
    drafter_error: str | None


def decode(
    decoder: SpeculativeDecoder,
    tokenizer: PreTrainedTokenizerBase,
    lines: Sequence[JobLine],
    *,
    rule: str,
    banned: Sequence[int],
    texts_per_line: int,
    on_emit: Callable[[Output], None] | None,
) -> Texts:
    """Decodes every line with its own settings.

    Args:
        lines: at least one.
        banned: ids that no text may have, beside those of its line.
        texts_per_line: as ``num_return_sequences``.
        on_emit: as the decoder's; for one line.

    Raises:
        ValueError: as :meth:`SpeculativeDecoder.generate`.
    """
    batches: dict[tuple, list[int]] = {}
    for i, line in enumerate(lines):
        s = line.settings
        of_batch = (s.max_new_tokens, s.stop, s.log_probs, s.top_log_probs, s.prompt_log_probs)
        batches.setdefault(of_batch, []).append(i)
    prompts, found, results = [line.tokens(tokenizer) for line in lines], {}, []
    for (max_new_tokens, stop, log_probs, top_log_probs, prompt_log_probs), members in batches.items():
        settings = [lines[i].settings for i in members]
        result = decoder.generate(
            [prompts[i] for i in members],
            max_new_tokens=max_new_tokens,
            params=_joined([lines[i].params for i in members]),
            seed=[s.seed for s in settings],
            rule=rule,
            logit_bias=_one_or_each([s.logit_bias for s in settings]),
            banned_tokens=[[*s.banned_tokens, *banned] for s in settings],
            min_new_tokens=_one_or_each([s.min_new_tokens for s in settings]),
            log_probs=log_probs,
            top_log_probs=top_log_probs,
            prompt_log_probs=prompt_log_probs,
            num_return_sequences=texts_per_line,
            stop=StopStrings(tokenizer, stop) if stop else None,
            on_emit=on_emit,
        )
        results.append(result)
        for k, i in enumerate(members):
            rows = range(k * texts_per_line, (k + 1) * texts_per_line)
            found[i] = [_text(lines[i], prompts[i], result, row) for row in rows]
    texts = [text for i in range(len(lines)) for text in found[i]]
    error = next((result.drafter_error for result in results if result.drafter_error is not None), None)
    return Texts(texts, _total([result.stats for result in results]), error)


def _text(line: JobLine, prompt: list[int], result: GenerationResult, row: int) -> Text:
    return Text(
        line,
        prompt,
        result.tokens[row],
        result.produced_by[row],
        result.finish_reason[row],
        result.status[row],
        dataclasses.replace(result.sequence_stats[row], seconds=result.stats.seconds),
        None if result.log_probs is None else result.log_probs[row],
        None if result.raw_log_probs is None else result.raw_log_probs[row],
        None if result.top_log_probs is None else result.top_log_probs[row],
        None if result.prompt_log_probs is None else result.prompt_log_probs[row],
    )


def _one_or_each(values: list[T]) -> T | list[T]:
    """The value where all are equal, else all of them."""
    return values[0] if all(value == values[0] for value in values) else values


def _joined(params: list[SamplingParams]) -> SamplingParams:
    """The parameters of every sequence in one: as they are where they are equal, else as tensors."""
    if all(each == params[0] for each in params):
        return params[0]
    columns: dict[str, torch.Tensor] = {}
    for field in dataclasses.fields(SamplingParams):
        values = [getattr(each, field.name) for each in params]
        neutral = SamplingParams.neutral(field.name)
        dtype = torch.int64 if field.name == "top_k" else torch.float64
        columns[field.name] = torch.tensor([neutral if value is None else value for value in values], dtype=dtype)
    return SamplingParams(**columns)


def _total(parts: list[Stats]) -> Stats:
    """The sums over batches that were decoded one after another."""
    total = Stats.total(parts, len(parts[0].drafted_by_position))
    total.target_forwards = sum(part.target_forwards for part in parts)
    total.draft_forwards = sum(part.draft_forwards for part in parts)
    total.seconds = {name: sum(part.seconds[name] for part in parts) for name in parts[0].seconds}
    return total
