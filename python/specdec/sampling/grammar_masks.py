"""Which tokens the grammars of a batch's rows allow: walked on the host, read by the kernels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..checks import is_failure
from .grammar import Grammar, words_of

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLExecutor, LLMatcher


class GrammarError(ValueError):
    """A grammar cannot say what may follow a text, which ends there, and no other text does."""


class Failure(NamedTuple):
    """Where the walk through a text's drafts ended."""

    after: int  # so many drafts: the masks up to here are known, that of the next token is not
    error: GrammarError


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
        failures: of the rows in whose drafts the grammar failed, since tokens were added to their texts last.
    """

    def __init__(self, vocab_size: int, device: torch.device):
        self.failures: dict[int, Failure] = {}
        self._walks: dict[int, _Walk] = {}
        self._vocab_size, self._device = vocab_size, device

    def __bool__(self) -> bool:
        return bool(self._walks)

    def while_drafting(self, index: int) -> bool:
        """Whether draft ``index`` of a chain is drawn from what grammars allow, too: where the host need not wait for
        the drafts before it, which on a GPU is the first."""
        return bool(self._walks) and (index == 0 or self._device.type == "cpu")

    @property
    def rows(self) -> Collection[int]:
        """Those whose texts have grammars."""
        return self._walks.keys()

    def begin(self, row: int, grammar: Grammar) -> None:
        """Begins a text in this row."""
        self._walks[row] = _Walk(grammar)

    def end(self, row: int) -> None:
        self._walks.pop(row, None)
        self.failures.pop(row, None)

    def follow(self, row: int, tokens: Sequence[int]) -> None:
        """Adds emitted tokens to the text of a row. If its grammar does not allow them, its next mask fails."""
        if (walk := self._walks.get(row)) is not None:
            walk.follow(tokens, again=self.failures.pop(row, None) is not None)

    def forced(self, row: int) -> list[int]:
        """Returns the tokens that must follow the text of a row: those that are left when nothing else is allowed."""
        walk = self._walks.get(row)
        return [] if walk is None else walk.forced()

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
        before has probability 0, so these rows are not reached. Where it fails everything is allowed, too, and
        ``failures`` says so."""
        rows = sent.rows()
        length = sent.tokens.shape[1] + 1
        shape, on_gpu = (len(rows), length, -(-self._vocab_size // 32)), self._device.type == "cuda"
        masks = torch.full(shape, -1, dtype=torch.int32, pin_memory=on_gpu)
        # An id outside of the vocabulary ends the drafts, and would end the matcher, too.
        chains = {
            row: list(takewhile(lambda token: 0 <= token < self._vocab_size, own))
            for row, own in enumerate(rows)
            if row in self._walks
        }
        self._fill(masks, chains)
        return masks.to(self._device, non_blocking=True)

    def _fill(self, masks: torch.Tensor, chains: dict[int, list[int]]) -> None:
        at_once = {row: chain for row, chain in chains.items() if row not in self.failures}
        try:
            with _library():
                self._fill_at_once(masks, at_once)
                alone = [row for row in chains if row not in at_once or self._walks[row].matcher().is_error()]
        except GrammarError:  # of one of them, which left the others somewhere on their ways
            alone = list(chains)
        for row in alone:
            known = self.failures.get(row)
            failure = self._walks[row].fill(masks[row].numpy(), chains[row], known)
            if failure is not None:
                self.failures[row] = failure

    def _fill_at_once(self, masks: torch.Tensor, chains: dict[int, list[int]]) -> None:
        from llguidance import numpy as library

        executor, flat = _executor(torch.get_num_threads()), masks.flatten(0, 1).numpy()
        places = [(self._walks[row].matcher(), row * masks.shape[1], chain) for row, chain in chains.items()]
        if following := [place for place in places if place[2]]:
            library.fill_next_token_bitmask_par_with_draft_tokens(executor, following, flat)
        if alone := [(matcher, at) for matcher, at, chain in places if not chain]:
            library.fill_next_token_bitmask_par(executor, alone, flat)


class _Walk:
    """The way of one text through its grammar."""

    def __init__(self, grammar: Grammar):
        self._grammar, self._text = grammar, list[int]()
        self._matcher: LLMatcher | None = None  # after the text; None: to be made of it

    def matcher(self) -> LLMatcher:
        """The state after the text. Raises GrammarError."""
        if self._matcher is None:
            with _library():
                matcher = self._grammar.matcher()
                if self._text and not matcher.consume_tokens(self._text):
                    raise _error_of(matcher)
            self._matcher = matcher
        return self._matcher

    def follow(self, tokens: Sequence[int], again: bool) -> None:
        """
        Args:
            again: whether the state is no longer that of the text.
        """
        self._text += tokens
        matcher, self._matcher = self._matcher, None
        if matcher is None or again:
            return
        with contextlib.suppress(GrammarError), _library():  # which the next mask says
            if matcher.consume_tokens(list(tokens)):
                self._matcher = matcher

    def forced(self) -> list[int]:
        try:
            with _library():
                return self.matcher().compute_ff_tokens()
        except GrammarError:  # which the next mask says
            self._matcher = None
            return []

    def fill(self, masks: np.ndarray, chain: Sequence[int], known: Failure | None) -> Failure | None:
        """Writes the masks [k + 1, W] one by one, as plain decoding would ask for them, and returns where that failed.
        So a text fails where it would fail without drafts, and not because of a draft that it does not take.

        Args:
            known: where it failed when there were fewer drafts.
        """
        from llguidance import numpy as library

        masks[:] = -1
        self._matcher, place = None, 0
        try:
            with _library():
                matcher = self.matcher()
                while known is None or place < known.after:
                    library.fill_next_token_bitmask(matcher, masks, place)
                    if matcher.is_error():
                        raise _error_of(matcher)
                    if place == len(chain) or matcher.is_stopped():
                        return None
                    place += 1  # what fails in following a draft is the mask after it
                    followed = matcher.try_consume_tokens([chain[place - 1]])
                    if matcher.is_error():
                        raise _error_of(matcher)
                    if not followed:
                        return None
                return known
        except GrammarError as error:
            masks[place:] = -1
            return Failure(place, error)
        finally:
            self._matcher = None  # it has followed drafts


def _error_of(matcher: LLMatcher) -> GrammarError:
    return GrammarError(f"grammar: {words_of(matcher.get_error()) or 'a token was emitted that it does not allow'}")


@contextlib.contextmanager
def _library() -> Iterator[None]:
    """Raises GrammarError for whatever the library raises. (Most of its own panics it returns as errors.)"""
    try:
        yield
    except GrammarError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise GrammarError(f"grammar: {words_of(str(error))}") from error


@functools.cache
def _executor(threads: int) -> LLExecutor:
    """The library's own choice would be most of the machine's CPUs."""
    from llguidance import LLExecutor

    return LLExecutor(threads)
