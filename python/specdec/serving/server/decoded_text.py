"""The text of a request while it is decoded."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase

from specdec_kernels import Status

from ...detokenize import Detokenizer, IncrementalText
from ...loop.request import Request
from ...loop.sequence import Output, SequenceState
from ...result import FinishReason, Producer, TokenLogProb
from ...sampling.grammar_masks import GrammarError
from ..engine import EngineStopped
from ..scheduler import QueueFull
from .errors import ApiError, queue_full
from .lanes import Lane
from .metrics import Metrics, RequestMetrics
from .stop_cut import StopCut

log = logging.getLogger(__name__)
T = TypeVar("T")
_REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.FAILED: "error",
}


class Token(NamedTuple):
    """A token of a text."""

    id: int
    text: str  # what it added; nothing where it ends inside of a character, or is special
    start: int  # how many characters of the text were there before it
    producer: Producer | None  # None: it is of the prompt
    scores: TokenLogProb | None  # None: not asked for


class TextStep(NamedTuple):
    """A step, of which all text is final."""

    drafts: list[int] | None  # what it drafted for this text; None: not asked for, or a tree
    tokens: list[Token]


class Piece(NamedTuple):
    """What became final at one time: later tokens do not change it. A token comes with the first text after its
    beginning, and a step with all of its text."""

    text: str
    tokens: list[Token]
    steps: list[TextStep]


class DecodedText:
    """The continuation of one prompt, as it is decoded in a lane.

    Of the token in which a stop string begins, only the text before it counts; later tokens appear nowhere, but were
    generated, so ``ended`` has them.

    Attributes:
        ended: the whole sequence, once it has ended.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        lane: Lane,
        number: int,
        request: Request,
        measured: RequestMetrics,
        cut: StopCut | None = None,
    ):
        self.lane, self.number, self.request = lane, number, request
        self.ended: SequenceState | None = None
        self._arrivals, self._measured = lane.engine.arrivals(number), measured
        self._incremental = IncrementalText(detokenizer, request.prompt)
        self._cut = StopCut(()) if cut is None else cut
        self._length = self._final = 0  # characters that tokens added so far, and those of them that are final
        self._tokens: list[Token] = []  # those that are not final, and so the next two
        self._steps: list[TextStep] = []

    @classmethod
    async def begin(
        cls, detokenizer: Detokenizer, lane: Lane, request: Request, metrics: Metrics, cut: StopCut | None = None
    ) -> DecodedText:
        """Submits a request.

        Args:
            cut: of the stop strings at which ``request.stop`` ends it.

        Raises:
            ApiError: the request is invalid, the queue is full, or the engine has ended.
        """
        try:
            number = await lane.engine.submit(request)
        except ValueError as error:
            raise ApiError.invalid(error) from error
        except QueueFull as error:
            raise queue_full(f"too many requests wait: {error}") from error
        except EngineStopped as error:
            raise ApiError(503, "the server takes no requests any more", "engine_stopped") from error
        return cls(detokenizer, lane, number, request, metrics.begin(lane, len(request.prompt)), cut)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yields the text as it comes: a piece for each step or, where the reader is late, for several. If the reader
        stops early, the request is cancelled. With the last piece there is ``ended``."""
        async with aclosing(self._arrivals) as arrivals:
            async for updates in arrivals:
                if any(piece := self._read(updates)):
                    yield piece

    async def close(self) -> None:
        """Cancels the request unless it has ended. Nobody may be reading ``pieces`` any more."""
        await self._arrivals.aclose()
        if self.ended is None:
            self._measured.abandoned()
            await self.lane.engine.cancel(self.number)

    @property
    def finish_reason(self) -> str:
        assert self.ended is not None, "the text has not ended"
        return _REASONS[self.ended.finish_reason or FinishReason.FAILED]

    def prompt_scores(self, top: int | None) -> list[TokenLogProb | None]:
        """Of each token of the prompt, with the ``top`` most likely tokens; None for each: not asked for."""
        assert self.ended is not None
        if top is None or self.ended.prompt_log_probs is None:
            return [None] * len(self.request.prompt)
        return [each and each._replace(top=each.top[:top]) for each in self.ended.prompt_log_probs]

    def check(self) -> None:
        """Raises ApiError if the text has ended, but not by itself."""
        if self.finish_reason == "cancelled":
            raise ApiError(503, "the server is shutting down", "cancelled")
        if self.ended is not None and self.ended.finish_reason is FinishReason.FAILED:
            error = self.ended.error
            kind = None if error is None else error.partition(":")[0]  # the rest may quote the request
            log.warning("a text failed", extra={"facts": {"status": self.ended.status.name, "error": kind}})
            why = "the model's logits define no distribution" if error is None else "it could not be decoded"
            if isinstance(self.ended.exception, GrammarError):  # of a schema that came with the request
                raise ApiError(400, f"the text failed in the middle: {self.ended.exception}", "grammar")
            if self.request.grammar is not None and Status.TARGET_EMPTY in self.ended.status:
                raise ApiError(400, "the text failed: its grammar allows no token that the model may emit", "grammar")
            raise ApiError(500, f"the text failed: {why}", "decoding_failed")

    def _read(self, updates: list[Output]) -> Piece:
        outputs = [update for update in updates if update.tokens]
        if outputs:
            self._measured.delivered(outputs)
        text = "".join(map(self._take, outputs))
        self._final += len(text)
        if updates[-1].finish_reason is not None:
            self.ended = updates[-1].sequence
            self._measured.ended(self.ended, self.finish_reason)
            return self._finish(text)
        return Piece(text, _take_while(self._tokens, self._begins), _take_while(self._steps, self._ends))

    def _take(self, output: Output) -> str:
        """Returns the text that is final now."""
        scores: Sequence[TokenLogProb | None] = output.top_log_probs or [None] * len(output.tokens)
        tokens, text = [], ""
        for token, producer, score in zip(output.tokens, output.produced_by, scores, strict=True):
            added = self._incremental.push([token])
            tokens.append(Token(token, added, self._length, producer, score))
            self._length += len(added)
            text += self._cut.push(added)
        self._tokens += tokens
        self._steps.append(TextStep(output.drafts, tokens))
        return text

    def _finish(self, text: str) -> Piece:
        """The last piece, which begins with ``text``."""
        rest = self._cut.push(self._incremental.finish()) + self._cut.finish()
        self._final += len(rest)
        text += rest
        if not self._cut.found:
            return Piece(text, self._tokens, self._steps)
        steps = [
            TextStep(step.drafts, [*map(self._shortened, filter(self._begins, step.tokens))]) for step in self._steps
        ]
        return Piece(text, [*filter(self._begins, self._tokens)], [step for step in steps if step.tokens])

    def _begins(self, token: Token) -> bool:
        """Whether there is final text after its beginning."""
        return token.start < self._final

    def _ends(self, step: TextStep) -> bool:
        last = step.tokens[-1]
        return self._begins(last) and last.start + len(last.text) <= self._final

    def _shortened(self, token: Token) -> Token:
        return token._replace(text=token.text[: self._final - token.start])


def spelled(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], scores: Sequence[TokenLogProb | None]
) -> list[Token]:
    """The tokens of a prompt, with the text that each adds."""
    incremental, tokens, read = IncrementalText(tokenizer), [], 0
    for token, score in zip(prompt, scores, strict=True):
        added = incremental.push([token])
        tokens.append(Token(token, added, read, None, score))
        read += len(added)
    return tokens


def _take_while(items: list[T], condition: Callable[[T], bool]) -> list[T]:
    """Removes from the front of ``items`` those that fulfil the condition, and returns them."""
    taken = list(itertools.takewhile(condition, items))
    del items[: len(taken)]
    return taken
