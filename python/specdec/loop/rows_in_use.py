"""How many rows the steps of a batch have: those in use, and few others, so that a step costs what its load does."""

from __future__ import annotations

PATIENCE = 8  # steps for which fewer rows must suffice before steps have fewer, as each number has costs of its own


class RowsInUse:
    """A step has the first n rows of the batch. There are few values of n, since each one is a shape of its own.

    Args:
        size: of the batch, the largest n.
        factor: between one n and the next.
    """

    def __init__(self, size: int, factor: int = 2):
        self._sizes = [size]
        while self._sizes[0] > 1:
            # The next smaller power of the factor.
            power = 1
            while power * factor < self._sizes[0]:
                power *= factor
            self._sizes.insert(0, power)
        self._current, self._spare = 1, 0

    def next(self, used: int) -> int:
        """Returns n for the next step: at least ``used`` >= 1, and not less than before unless less has sufficed for
        a while."""
        enough = next(n for n in self._sizes if n >= used)
        self._spare = self._spare + 1 if enough < self._current else 0
        if enough > self._current or self._spare > PATIENCE:
            self._current, self._spare = enough, 0
        return self._current
