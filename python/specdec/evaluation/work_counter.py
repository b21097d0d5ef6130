"""How far an evaluation is, told to a callback: what draws it is on the right of this room."""

from __future__ import annotations

from collections.abc import Callable

Tell = Callable[[int, int, str], None]  # parts of the work that are done, how many there are, what is done now


class Work:
    """Counts the parts of a piece of work.

    Args:
        tell: called whenever a part is done, or another kind of part begins.
        total: parts of all kinds, of about the same length.
    """

    def __init__(self, tell: Tell, total: int):
        self._tell, self._total, self._done, self._what = tell, total, 0, ""

    def begin(self, what: str) -> None:
        """The next parts are ``what``."""
        self._what = what
        self._tell(self._done, self._total, what)

    def did_one(self) -> None:
        self.did(1)

    def did(self, parts: int) -> None:
        self._done = min(self._done + parts, self._total)
        self._tell(self._done, self._total, self._what)


def silent(done: int, total: int, what: str) -> None:
    """A ``Tell`` that tells nobody."""
