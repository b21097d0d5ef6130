"""transformers' logits processors in the loop: slower than parameters, and for whatever these cannot say."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from ..checks import refuse

# They remember the calls before: a second one for the same position, as after a rejection, would change the text.
_STATEFUL = ("SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor")


def refuse_stateful(processors: Sequence[LogitsProcessor]) -> None:
    for p in processors:
        if any(kind.__name__ in _STATEFUL for kind in type(p).__mro__):
            given = f"a {type(p).__name__}"
            refuse("logits_processor", given, "pure functions of (input_ids, scores); this one keeps a state")


def read_processors(
    processors: Sequence[LogitsProcessor] | Sequence[Sequence[LogitsProcessor]] | None, batch_size: int
) -> list[LogitsProcessorList]:
    """Of every sequence.

    Args:
        processors: a ``LogitsProcessorList``, or a list of processors, which run in this order; or such a list for
            each sequence.
    """
    if not processors:
        return [LogitsProcessorList() for _ in range(batch_size)]
    if isinstance(processors, Sequence) and all(isinstance(p, Sequence) for p in processors):
        lists = [_read(own) for own in processors]
        if len(lists) != batch_size:
            refuse("logits_processor", f"{len(lists)} lists", f"one for each of the {batch_size} sequences")
        return lists
    return [_read(processors)] * batch_size


class Processors:
    """Raw logits to raw logits, by row: each sequence's own text and the drafts before the row, without padding.

    Attributes:
        of_rows: each row's; an empty list where there are none.
        errors: what a row's processors raised, and what only that row pays for: its logits stay as they were.
    """

    def __init__(self, size: int, vocab_size: int):
        self.of_rows = [LogitsProcessorList() for _ in range(size)]
        self.errors: dict[int, Exception] = {}
        self.vocab_size = vocab_size

    def __bool__(self) -> bool:
        return any(self.of_rows)

    def __call__(
        self,
        logits: torch.Tensor,
        texts: Sequence[Sequence[int]],
        allowed: Sequence[int],
        drafts: torch.Tensor,
        d2t: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the processors make of rows that are consulted; the others stay as they are.

        Args:
            logits: [B, n, V], the last n of the rows that follow no draft, one, ... all of ``drafts``.
            texts: the known tokens of each sequence; [] where it has ended, or has no processors.
            allowed: how many drafts of each sequence count.
            drafts: [B, i] int64.
            d2t: the target's ids of the logits' columns, where these are a reduced vocabulary.

        Returns:
            [B, n, V] float32.
        """
        logits = logits.to(torch.float32, copy=True)
        first = drafts.shape[1] + 1 - logits.shape[1]
        for b, (text, tokens) in enumerate(zip(texts, drafts.tolist(), strict=True)):
            for row in range(logits.shape[1] if text and self.of_rows[b] and b not in self.errors else 0):
                before = tokens[: first + row]
                # No row after a draft that does not count or that the target never accepts is consulted.
                if len(before) > allowed[b] or not all(0 <= token < self.vocab_size for token in before):
                    break
                if row > 0 and logits[b, row - 1, before[-1]] == -torch.inf:
                    break
                ids = torch.tensor([[*text, *before]], device=logits.device)
                try:
                    logits[b, row] = self._processed(self.of_rows[b], ids, logits[b, row][None], d2t)
                except Exception as error:  # whatever a processor does: it is one sequence's
                    self.errors[b] = error
                    break
        return logits

    def _processed(
        self, processors: LogitsProcessorList, ids: torch.Tensor, scores: torch.Tensor, d2t: torch.Tensor | None
    ) -> torch.Tensor:
        if d2t is not None:
            whole = scores.new_full((1, self.vocab_size), -torch.inf)
            whole[:, d2t] = scores
            scores = whole
        shape = scores.shape
        scores = processors(ids, scores.clone())  # type: ignore[arg-type]  # their Long and FloatTensor
        if not isinstance(scores, torch.Tensor) or scores.shape != shape:
            given = f"scores of shape {list(scores.shape)}" if isinstance(scores, torch.Tensor) else repr(scores)
            refuse("logits_processor", f"{given} back", f"shape {list(shape)}, as they were given")
        return scores[0] if d2t is None else scores[0, d2t]


def _read(processors: object) -> LogitsProcessorList:
    if not isinstance(processors, Sequence) or not all(callable(p) for p in processors):
        refuse("logits_processor", repr(processors), "a LogitsProcessorList, or a list of LogitsProcessor")
    refuse_stateful(processors)
    return LogitsProcessorList(processors)
