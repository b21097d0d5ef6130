"""Runs transformers' logits processors in the loop: slower than parameters, for effects that these do not offer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NoReturn, cast

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as theirs

from ..checks import is_failure, refuse

# These remember earlier calls, so a second call for the same position, as after a rejection, would change the text.
_STATEFUL = ("SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor")


def refuse_stateful(processors: Sequence[LogitsProcessor]) -> None:
    for p in processors:
        if any(kind.__name__ in _STATEFUL for kind in type(p).__mro__):
            _refuse_as_stateful(p)


def _refuse_as_stateful(p: LogitsProcessor) -> NoReturn:
    named = type(_given(p)).__name__
    allowed = "pure functions of (input_ids, scores), which find what they need in input_ids at every call"
    refuse("logits_processor", f"a {named}, which keeps a state between calls", allowed)


def read_processors(
    processors: Sequence[LogitsProcessor] | None, text: Sequence[int], vocab_size: int, device: torch.device
) -> LogitsProcessorList:
    """Returns the processors of one sequence, which run in this order. Those that are not transformers' own are tried.

    Args:
        text: what they are shown first.

    Raises:
        ValueError: names them, or one that keeps a state.
    """
    if not processors:
        return LogitsProcessorList()
    if not isinstance(processors, Sequence) or not all(callable(p) for p in processors):
        refuse("logits_processor", repr(processors), "a LogitsProcessorList, or a list of LogitsProcessor")
    refuse_stateful(processors)
    ids = torch.tensor([list(text)], dtype=torch.int64, device=device)
    for p in processors:
        if type(p).__module__ != theirs.__name__ and _remembers(p, ids, vocab_size):
            _refuse_as_stateful(p)
    return LogitsProcessorList(processors)


def _remembers(p: LogitsProcessor, ids: torch.Tensor, vocab_size: int) -> bool:
    """Whether ``p`` answers differently when it is shown a text [1, n] again, with one token more in between, as it
    happens where a draft is rejected. Warns of one that counts its calls, as it may sooner or later."""
    alone = LogitsProcessorList([p])  # which hands on no arguments that ``p`` does not take
    scores = torch.linspace(-4.0, 4.0, vocab_size, device=ids.device)[None]
    try:
        first = alone(ids, scores.clone())  # type: ignore[arg-type]  # declared as LongTensor and FloatTensor
        alone(torch.cat((ids, first.argmax(-1, keepdim=True)), 1), scores.clone())  # type: ignore[arg-type]
        again = alone(ids, scores.clone())  # type: ignore[arg-type]
        counted = _counts(p)
        alone(ids, scores.clone())  # type: ignore[arg-type]
        if counted != _counts(p):
            named = type(_given(p)).__name__
            told = f"a {named} counts its calls, which are more than a text has tokens: drafts are shown to it as well"
            warnings.warn(f"logits_processor: {told}", RuntimeWarning, stacklevel=2)
        return not torch.equal(first.nan_to_num(), again.nan_to_num())
    except BaseException as error:  # what it raises ends its sequence alone, once it is decoded
        if not is_failure(error):
            raise
        return False


def _counts(p: LogitsProcessor) -> dict[str, object]:
    """The numbers that a processor has as attributes, and the lengths of its lists."""
    own = vars(_given(p))
    numbers: dict[str, object] = {name: value for name, value in own.items() if isinstance(value, int | float | str)}
    return numbers | {name: len(value) for name, value in own.items() if isinstance(value, list | dict | set)}


def _given(p: LogitsProcessor) -> LogitsProcessor:
    """The caller's own processor."""
    return p.processor if isinstance(p, OfRow) else p


class OfRow(LogitsProcessor):
    """Shows one sequence as all B rows of a batch to ``processor``, and takes the answer for its row."""

    def __init__(self, processor: LogitsProcessor, row: int, batch_size: int):
        self.processor, self._row, self._batch_size = processor, row, batch_size

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        shape = (self._batch_size, -1)
        batch = cast(torch.LongTensor, input_ids.expand(shape))
        alone = LogitsProcessorList([self.processor])
        whole = alone(batch, cast(torch.FloatTensor, scores.expand(shape).clone()))
        return whole[self._row : self._row + 1] if isinstance(whole, torch.Tensor) else whole  # refused by who called


class Processors:
    """Applies each sequence's processors to its raw logits, given its text and the drafts before each logits row.

    Attributes:
        of_rows: the processors of each batch row; an empty list for a row without processors.
        errors: the exceptions that processors raised, by batch row. The logits of such a row stay unprocessed.
    """

    def __init__(self, size: int, vocab_size: int):
        self.of_rows = [LogitsProcessorList() for _ in range(size)]
        self.errors: dict[int, BaseException] = {}
        self.vocab_size = vocab_size

    def __bool__(self) -> bool:
        return any(self.of_rows)

    def __call__(
        self,
        logits: torch.Tensor,
        texts: Sequence[Sequence[int]],
        counts: torch.Tensor,
        drafts: torch.Tensor,
        parents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the target's logits with processors applied wherever verification can read them; others stay as they
        are. Waits for the device.

        Args:
            logits: [B, n + 1, V]: row 0 after the text, row 1 + i after draft i.
            texts: the known tokens of each sequence; [] if it has ended or has no processors.
            counts: [B, n] bool, the drafts that count; with a draft those before it on its path count.
            drafts: [B, n] int64.
            parents: [n] or [B, n] int64, the drafts that these follow, -1: the text. None: each follows the one before.

        Returns:
            [B, n + 1, V] float32.
        """
        logits = logits.to(torch.float32, copy=True)
        if parents is None:
            parents = torch.arange(-1, drafts.shape[1] - 1)
        trees = zip(texts, counts.tolist(), drafts.tolist(), parents.expand(drafts.shape).tolist(), strict=True)
        for b, (text, counted, tokens, before) in enumerate(trees):
            if not text or not self.of_rows[b] or b in self.errors or not self._process(logits, b, 0, text):
                continue
            paths = {-1: list(text)}  # the whole text up to a draft that can be accepted
            for draft, (counts_here, token, parent) in enumerate(zip(counted, tokens, before, strict=True)):
                if not counts_here or parent not in paths or logits[b, parent + 1, token] == -torch.inf:
                    continue
                paths[draft] = [*paths[parent], token]
                if not self._process(logits, b, draft + 1, paths[draft]):
                    break
        return logits

    def of_next_draft(
        self,
        logits: torch.Tensor,
        texts: Sequence[Sequence[int]],
        allowed: Sequence[int],
        drafts: torch.Tensor,
        d2t: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns a draft model's logits after a chain of ``drafts``, with processors applied for sequences that may
        draft another token. Waits for the device.

        Args:
            logits: [B, columns].
            texts: as for verification.
            allowed: how many drafts of each sequence count.
            drafts: [B, i] int64.
            d2t: the target's ids of the logits' columns, if these are a reduced vocabulary.

        Returns:
            [B, columns] float32.
        """
        logits = logits.to(torch.float32, copy=True)[:, None]
        for b, (text, before) in enumerate(zip(texts, drafts.tolist(), strict=True)):
            counts = len(before) < allowed[b] and all(0 <= token < self.vocab_size for token in before)
            if text and self.of_rows[b] and b not in self.errors and counts:
                self._process(logits, b, 0, [*text, *before], d2t)
        return logits[:, 0]

    def _process(
        self, logits: torch.Tensor, b: int, row: int, text: Sequence[int], d2t: torch.Tensor | None = None
    ) -> bool:
        """Applies the processors of batch row ``b`` to one of its rows of logits, in place. False: one raised."""
        ids = torch.tensor([text], device=logits.device)
        try:
            logits[b, row] = self._processed(self.of_rows[b], ids, logits[b, row][None], d2t)
        except BaseException as error:  # whatever it is, it concerns only this sequence
            if not is_failure(error):
                raise
            self.errors[b] = error
            return False
        return True

    def _processed(
        self, processors: LogitsProcessorList, ids: torch.Tensor, scores: torch.Tensor, d2t: torch.Tensor | None
    ) -> torch.Tensor:
        if d2t is not None:
            whole = scores.new_full((1, self.vocab_size), -torch.inf)
            whole[:, d2t] = scores
            scores = whole
        shape = scores.shape
        scores = processors(ids, scores.clone())  # type: ignore[arg-type]  # declared as LongTensor and FloatTensor
        if not isinstance(scores, torch.Tensor) or scores.shape != shape:
            given = f"scores of shape {list(scores.shape)}" if isinstance(scores, torch.Tensor) else repr(scores)
            refuse("logits_processor", f"{given} back", f"shape {list(shape)}, as they were given")
        return scores[0] if d2t is None else scores[0, d2t]
