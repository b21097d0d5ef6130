"""Counts how many tokens of the caches each sequence has reserved."""

from __future__ import annotations

from ..checks import read_count, refuse


class TokenLedger:
    """The reserved tokens of the caches. A sequence reserves its prompt and its ``max_new_tokens`` before it gets a
    row, so a cache never overflows.

    Args:
        budget: the most tokens that may be reserved at one time, >= 0.
    """

    def __init__(self, budget: int):
        self.budget = read_count("budget", budget)
        self.used = 0
        self._promised: dict[int, int] = {}

    def __len__(self) -> int:
        """Returns the number of sequences with a reservation."""
        return len(self._promised)

    def reserve(self, sequence: int, tokens: int) -> bool:
        """Reserves ``tokens`` for ``sequence``. Returns False, without a change, if fewer are left now.

        Raises:
            ValueError: ``tokens`` exceeds the whole budget, or ``sequence`` already has a reservation.
        """
        if read_count("tokens", tokens) > self.budget:
            refuse("tokens", f"{tokens} for sequence {sequence}", f"<= {self.budget}, the whole budget")
        if sequence in self._promised:
            refuse("sequence", f"{sequence}, which holds {self._promised[sequence]} tokens", "one that holds none")
        if self.used + tokens > self.budget:
            return False
        self._promised[sequence] = tokens
        self.used += tokens
        return True

    def release(self, sequence: int) -> int:
        """Releases the reservation of ``sequence``. Returns its tokens.

        Raises:
            ValueError: it has no reservation: it was released before, or never admitted.
        """
        if sequence not in self._promised:
            refuse("sequence", f"{sequence}, which holds no tokens", "one that was admitted and not yet released")
        tokens = self._promised.pop(sequence)
        self.used -= tokens
        return tokens
