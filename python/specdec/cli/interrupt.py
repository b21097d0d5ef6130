"""Ctrl-C ends an answer after the step that is running."""

from __future__ import annotations

import signal
from types import FrameType

from ..stopping import StoppingCriteria


class Interrupt:
    """Inside the block the first Ctrl-C ends the text with the tokens of the next report, as any stop does, so that
    nothing that was counted is lost. A second one raises KeyboardInterrupt at once.

    Args:
        stop: what else ends the text; None: nothing.
    """

    def __init__(self, stop: StoppingCriteria | None):
        self._stop, self.pressed = stop, False

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._take)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def first_end(self, sequence: int, text: list[int], new: int) -> int | None:
        """As ``StoppingCriteria`` has it."""
        kept = None if self._stop is None else self._stop.first_end(sequence, text, new)
        return new if kept is None and self.pressed else kept
