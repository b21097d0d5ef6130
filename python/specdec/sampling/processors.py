"""Runs transformers' logits processors in the loop: slower than parameters, for effects that these do not offer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from ..checks import refuse

# These remember earlier calls, so a second call for the same position, as after a rejection, would change the text.
_STATEFUL = ("SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor")


def refuse_stateful(processors: Sequence[LogitsProcessor]) -> None:
    for p in processors:
        if any(kind.__name__ in _STATEFUL for kind in type(p).__mro__):
            given = f"a {type(p).__name__}"
            refuse("logits_processor", given, "pure functions of (input_ids, scores); this one keeps a state")


def read_processors(
    processors: Sequence[LogitsProcessor] | Sequence[Sequence[LogitsProcessor]] | None, batch_size: int
) -> list[LogitsProcessorList]:
    """Returns the processors of every sequence.

    Args:
        processors: a ``LogitsProcessorList``, or a list of processors, which run in this order; or one such list for
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
    """Applies each sequence's processors to its raw logits, given its text and the drafts before each logits row.

    Attributes:
        of_rows: the processors of each batch row; an empty list for a row without processors.
        errors: the exceptions that processors raised, by batch row. The logits of such a row stay unprocessed.
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
        """Returns the logits with processors applied wherever verification can read them; others stay as they are.

        Args:
            logits: [B, n, V], n <= i + 1: the logits after the last n of the prefixes of ``drafts`` with 0, ..., i
                tokens.
            texts: the known tokens of each sequence; [] if it has ended or has no processors.
            allowed: how many drafts of each sequence count.
            drafts: [B, i] int64.
            d2t: the target's ids of the logits' columns, if these are a reduced vocabulary.

        Returns:
            [B, n, V] float32.
        """
        logits = logits.to(torch.float32, copy=True)
        first = drafts.shape[1] + 1 - logits.shape[1]
        for b, (text, tokens) in enumerate(zip(texts, drafts.tolist(), strict=True)):
            for row in range(logits.shape[1] if text and self.of_rows[b] and b not in self.errors else 0):
                before = tokens[: first + row]
                # Verification never reads a row after a draft that does not count, or that it cannot accept.
                if len(before) > allowed[b] or not all(0 <= token < self.vocab_size for token in before):
                    break
                if row > 0 and logits[b, row - 1, before[-1]] == -torch.inf:
                    break
                if not self._process(logits, b, row, [*text, *before], d2t):
                    break
        return logits

    def of_tree(
        self,
        logits: torch.Tensor,
        texts: Sequence[Sequence[int]],
        counts: torch.Tensor,
        nodes: torch.Tensor,
        parents: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the logits of the nodes of a tree with processors applied wherever verification can read them.

        Args:
            logits: [B, n + 1, V]: row 0 after the text, row 1 + i after node i.
            texts: as for chains.
            counts: [B, n] bool, the nodes that count; with a node its ancestors count.
            nodes, parents: [B, n] int64, the tokens, and the nodes that these follow; -1: the text.

        Returns:
            [B, n + 1, V] float32.
        """
        logits = logits.to(torch.float32, copy=True)
        trees = zip(texts, counts.tolist(), nodes.tolist(), parents.tolist(), strict=True)
        for b, (text, counted, tokens, before) in enumerate(trees):
            if not text or not self.of_rows[b] or b in self.errors or not self._process(logits, b, 0, text):
                continue
            paths = {-1: list(text)}  # the whole text up to a node that can be accepted
            for node, (counts_here, token, parent) in enumerate(zip(counted, tokens, before, strict=True)):
                if not counts_here or parent not in paths or logits[b, parent + 1, token] == -torch.inf:
                    continue
                paths[node] = [*paths[parent], token]
                if not self._process(logits, b, node + 1, paths[node]):
                    break
        return logits

    def _process(
        self, logits: torch.Tensor, b: int, row: int, text: Sequence[int], d2t: torch.Tensor | None = None
    ) -> bool:
        """Applies the processors of batch row ``b`` to one of its rows of logits, in place. False: one raised."""
        ids = torch.tensor([text], device=logits.device)
        try:
            logits[b, row] = self._processed(self.of_rows[b], ids, logits[b, row][None], d2t)
        except Exception as error:  # whatever it is, it concerns only this sequence
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


def _read(processors: object) -> LogitsProcessorList:
    if not isinstance(processors, Sequence) or not all(callable(p) for p in processors):
        refuse("logits_processor", repr(processors), "a LogitsProcessorList, or a list of LogitsProcessor")
    refuse_stateful(processors)
    return LogitsProcessorList(processors)
