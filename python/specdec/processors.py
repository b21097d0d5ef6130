"""transformers' logits processors in the loop: slower than parameters, and for whatever these cannot say."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from specdec_kernels.validation import refuse

# They remember the calls before: a second one for the same position, as after a rejection, would change the text.
_STATEFUL = ("SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor")


def refuse_stateful(processors: Sequence[LogitsProcessor]) -> None:
    for p in processors:
        if any(kind.__name__ in _STATEFUL for kind in type(p).__mro__):
            given = f"a {type(p).__name__}"
            refuse("logits_processor", given, "pure functions of (input_ids, scores); this one keeps a state")


class Processors:
    """Raw logits to raw logits, by row: each sequence's own text and the drafts before the row, without padding.

    Args:
        processors: a ``LogitsProcessorList``, or a list of processors, which run in this order; or such a list for
            each sequence.
        vocab_size: the target's.
    """

    def __init__(self, processors: Sequence[LogitsProcessor] | Sequence[Sequence[LogitsProcessor]], vocab_size: int):
        self._of_sequence: list[LogitsProcessorList] | None = None
        self._of_all, self._vocab_size = LogitsProcessorList(), vocab_size
        if processors and isinstance(processors, Sequence) and all(isinstance(p, Sequence) for p in processors):
            self._of_sequence = [_read(own) for own in processors]
        else:
            self._of_all = _read(processors)

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
            texts: the known tokens of each sequence; [] where it has ended.
            allowed: how many drafts of each sequence count.
            drafts: [B, i] int64.
            d2t: the target's ids of the logits' columns, where these are a reduced vocabulary.

        Returns:
            [B, n, V] float32.
        """
        logits = logits.to(torch.float32, copy=True)
        first = drafts.shape[1] + 1 - logits.shape[1]
        for b, (text, tokens) in enumerate(zip(texts, drafts.tolist(), strict=True)):
            for row in range(logits.shape[1] if text else 0):
                before = tokens[: first + row]
                # No row behind a draft that does not count or that the target never accepts is consulted.
                if len(before) > allowed[b] or not all(0 <= token < self._vocab_size for token in before):
                    break
                if row > 0 and logits[b, row - 1, before[-1]] == -torch.inf:
                    break
                ids = torch.tensor([[*text, *before]], device=logits.device)
                processors = self._of_all if self._of_sequence is None else self._of_sequence[b]
                logits[b, row] = self._processed(processors, ids, logits[b, row][None], d2t)
        return logits

    def _processed(
        self, processors: LogitsProcessorList, ids: torch.Tensor, scores: torch.Tensor, d2t: torch.Tensor | None
    ) -> torch.Tensor:
        if d2t is not None:
            whole = scores.new_full((1, self._vocab_size), -torch.inf)
            whole[:, d2t] = scores
            scores = whole
        shape = scores.shape
        scores = processors(ids, scores.clone())
        if not isinstance(scores, torch.Tensor) or scores.shape != shape:
            given = f"scores of shape {list(scores.shape)}" if isinstance(scores, torch.Tensor) else repr(scores)
            refuse("logits_processor", f"{given} back", f"shape {list(shape)}, as they were given")
        return scores[0] if d2t is None else scores[0, d2t]


def _read(processors: Sequence[LogitsProcessor]) -> LogitsProcessorList:
    if not isinstance(processors, Sequence) or not all(callable(p) for p in processors):
        refuse("logits_processor", repr(processors), "a LogitsProcessorList, or a list of LogitsProcessor")
    refuse_stateful(processors)
    return LogitsProcessorList(processors)
