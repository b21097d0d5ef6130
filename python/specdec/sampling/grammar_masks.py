"""Which tokens the grammars of a batch's rows allow: walked on the host, read by the kernels."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import torch

from .grammar import Grammar, one_line

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


class SentDrafts(NamedTuple):
    """Drafts [n, k] on their way to the host."""

    tokens: torch.Tensor
    arrived: torch.cuda.Event | None

    def rows(self) -> list[list[int]]:
        """Waits for them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tokens.tolist()


class GrammarMasks:
    """The state that each row's grammar has after the text of its sequence.

    A mask is [W] int32, W = ceil(V / 32): token v is allowed if bit v % 32 of word v // 32 is set.

    Attributes:
        errors: why a row's grammar cannot go on, by batch row; its masks allow everything from then on.
    """

    def __init__(self, vocab_size: int, device: torch.device):
        self.errors: dict[int, Exception] = {}
        self._matchers: dict[int, LLMatcher] = {}
        self._vocab_size, self._device = vocab_size, device

    def __bool__(self) -> bool:
        return bool(self._matchers)

    def while_drafting(self, index: int) -> bool:
        """Whether draft ``index`` of a chain is drawn from what grammars allow, too: where the host need not wait for
        the drafts before it, which on a GPU is the first."""
        return bool(self._matchers) and (index == 0 or self._device.type == "cpu")

    @property
    def rows(self) -> Collection[int]:
        """Those whose texts have grammars."""
        return self._matchers.keys()

    def begin(self, row: int, grammar: Grammar) -> None:
        """Begins a text in this row."""
        self._matchers[row] = grammar.matcher()

    def end(self, row: int) -> None:
        self._matchers.pop(row, None)
        self.errors.pop(row, None)

    def follow(self, row: int, tokens: Sequence[int]) -> None:
        """Adds emitted tokens to the text of a row. Raises ValueError if the grammar does not allow them."""
        if (matcher := self._matchers.get(row)) is not None and row not in self.errors:
            if not matcher.consume_tokens(list(tokens)):
                raise ValueError("grammar: a token was emitted that it does not allow")

    def forced(self, row: int) -> list[int]:
        """Returns the tokens that must follow the text of a row: those that are left when nothing else is allowed."""
        matcher = self._matchers.get(row)
        return [] if matcher is None or row in self.errors else matcher.compute_ff_tokens()

    def send(self, drafts: torch.Tensor) -> SentDrafts:
        """Begins to copy drafts [n, k] to the host, without waiting for them."""
        if not drafts.is_cuda or not drafts.shape[1]:
            return SentDrafts(drafts.cpu(), None)
        copy = torch.empty(drafts.shape, dtype=drafts.dtype, pin_memory=True).copy_(drafts, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return SentDrafts(copy, arrived)

    def after(self, sent: SentDrafts) -> torch.Tensor:
        """Returns the masks [n, k + 1, W] on the device: row 0 after the text, row 1 + i after draft i. Where
        the grammar has no such text everything is allowed, as in the rows of sequences without a grammar: the draft
        before has probability 0, so these rows are not reached."""
        rows = sent.rows()
        length = sent.tokens.shape[1] + 1
        shape, on_gpu = (len(rows), length, -(-self._vocab_size // 32)), self._device.type == "cuda"
        masks = torch.full(shape, -1, dtype=torch.int32, pin_memory=on_gpu)
        self._fill(masks, {row: drafts for row, drafts in enumerate(rows) if row in self._matchers})
        return masks.to(self._device, non_blocking=True)

    def _fill(self, masks: torch.Tensor, drafts: dict[int, list[int]]) -> None:
        from llguidance import numpy as library

        executor, alone, following = _executor(torch.get_num_threads()), [], []
        for row, own in drafts.items():
            if row in self.errors:
                continue
            # An id outside of the vocabulary ends the drafts, and would end the matcher, too.
            chain = list(takewhile(lambda token: 0 <= token < self._vocab_size, own))
            place, matcher = row * masks.shape[1], self._matchers[row]
            if chain:
                following.append((matcher, place, chain))
            else:
                alone.append((matcher, place))
        flat = masks.flatten(0, 1).numpy()
        if following:
            library.fill_next_token_bitmask_par_with_draft_tokens(executor, following, flat)
        if alone:
            library.fill_next_token_bitmask_par(executor, alone, flat)
        for row in drafts:
            if row not in self.errors and self._matchers[row].is_error():
                self.errors[row] = ValueError(f"grammar: {one_line(self._matchers[row].get_error())}")
                masks[row] = -1


@functools.cache
def _executor(threads: int) -> LLExecutor:
    """The library's own choice would be most of the machine's CPUs."""
    from llguidance import LLExecutor

    return LLExecutor(threads)
