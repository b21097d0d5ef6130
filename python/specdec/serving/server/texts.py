"""The text of a request while it is decoded."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple

from ...detokenize import IncrementalText
from ...result import Emission, End
from ..engine import EngineStopped
from ..requests import Outcome, Request
from ..scheduler import QueueFull
from .errors import ApiError
from .lanes import Lane
from .metrics import Metrics, RequestMetrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REASONS = {End.EOS: "stop", End.STOP: "stop", End.LENGTH: "length", End.CANCELLED: "cancelled", End.FAILED: "error"}


class Piece(NamedTuple):
    """What one step added to a text."""

    text: str  # final: later tokens do not change it
    emission: Emission


class Text:
    """The continuation of one prompt, as it is decoded in a lane.

    Attributes:
        outcome: once it has ended.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        lane: Lane,
        number: int,
        request: Request,
        measured: RequestMetrics,
    ):
        self.lane, self.number, self.request = lane, number, request
        self.outcome: Outcome | None = None
        self._measured = measured
        self._incremental = IncrementalText(tokenizer, list(request.prompt))

    @classmethod
    async def begin(cls, tokenizer: PreTrainedTokenizerBase, lane: Lane, request: Request, metrics: Metrics) -> Text:
        """Submits a request.

        Raises:
            ApiError: the request is invalid, the queue is full, or the engine has ended.
        """
        try:
            number = await lane.engine.submit(request)
        except ValueError as error:
            raise ApiError(400, str(error), str(error).partition(":")[0]) from error
        except QueueFull as error:
            raise ApiError(
                429, f"too many requests wait: {error}", code="queue_full", headers={"Retry-After": "1"}
            ) from error
        except EngineStopped as error:
            raise ApiError(503, "the server takes no requests any more") from error
        return cls(tokenizer, lane, number, request, metrics.begin(lane, len(request.prompt)))

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yields the text as it comes. If the reader stops early, the request is cancelled."""
        try:
            async with aclosing(self.lane.engine.stream(self.number)) as updates:
                async for update in updates:
                    if isinstance(update, Outcome):
                        self.outcome = update
                    else:
                        self._measured.emitted(len(update.tokens))
                        yield Piece(self._incremental.push(update.tokens), update)
        finally:
            self._measured.finished(self.outcome, self.finish_reason if self.outcome else "cancelled")
        if rest := self._incremental.finish():
            yield Piece(rest, Emission(self.number, [], []))

    @property
    def finish_reason(self) -> str:
        assert self.outcome is not None, "the text has not ended"
        return _REASONS[self.outcome.end]
