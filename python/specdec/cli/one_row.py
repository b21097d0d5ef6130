"""Decodes one text after the other in one row of caches, where a prompt that goes on from earlier texts is read only
from there on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..decoder import Decoded, SpeculativeDecoder
from ..loop.request import Request
from ..loop.sequence import Output
from ..sampling.grammar_masks import GrammarError
from ..serving.scheduler import Scheduler

GROWTH = 1024  # tokens: the caches are made anew, and the whole prompt is read, once a text needs that many more
CHUNK = 128  # of a prompt; a smaller one leaves fewer tokens to read after the last whole part, and reads more slowly


class OneRow:
    """The caches are as large as the texts so far have needed.

    Args:
        rule: as ``SpeculativeDecoder.generate`` takes it.
    """

    def __init__(self, decoder: SpeculativeDecoder, rule: str | None):
        self.decoder, self.rule = decoder, rule
        self._scheduler: Scheduler | None = None

    def decode(self, request: Request, on_emit: Callable[[Output], None]) -> Decoded:
        """Decodes a request as ``SpeculativeDecoder.decode`` does.

        Raises:
            ValueError: names its field, what was given and what is allowed.
        """
        scheduler = self._with_room(len(request.prompt) + request.max_new_tokens)
        timer = scheduler.batch.timer
        timer.lap("loop")  # what went by since the last text
        before = timer.with_total()
        scheduler.submit(request)
        try:
            while not scheduler.idle:
                for output in scheduler.step():
                    sequence = output.sequence
                    on_emit(output)
        except BaseException:  # an interrupt, perhaps, after which there may be half a text in the row
            self._scheduler = None
            raise
        if sequence.exception is not None and not isinstance(sequence.exception, GrammarError):
            raise sequence.exception
        if (error := scheduler.drafter_error) is not None:
            self._scheduler = None  # the next text gets a new session of it
        seconds = {part: seconds - before[part] for part, seconds in timer.with_total().items()}
        return Decoded([sequence], dataclasses.replace(sequence.stats, seconds=seconds), error)

    def _with_room(self, tokens: int) -> Scheduler:
        """Returns a scheduler for texts of so many tokens, if the models have as many positions."""
        if self._scheduler is None or self._scheduler.max_length < tokens:
            self._scheduler, most = None, self.decoder.max_length  # the memory of the old one is needed
            length = -(-tokens // GROWTH) * GROWTH
            length = length if most is None else min(length, most)
            made = Scheduler(self.decoder, rows=1, max_length=length, prefill_chunk=CHUNK, rule=self.rule)
            self._scheduler = made
        return self._scheduler
