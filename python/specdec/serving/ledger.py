"""Which sequence was promised how many tokens of the caches."""

from __future__ import annotations

from ..checks import read_count, refuse


class TokenLedger:
    """A sequence is promised its prompt and its ``max_new_tokens`` before it gets a row, so a cache never overflows.

    Args:
        budget: tokens that may be promised at one time, >= 0.
    """

    def __init__(self, budget: int):
        self.budget = read_count("budget", budget)
        self.used = 0
        self._promised: dict[int, int] = {}

    def __len__(self) -> int:
        """Sequences that hold a promise."""
        return len(self._promised)

    def reserve(self, sequence: int, tokens: int) -> bool:
        """False, and nothing changes, where so many are not left now.

        Raises:
            ValueError: they never will be; or ``sequence`` holds a promise already.
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
        """How many tokens it held.

        Raises:
            ValueError: it holds no promise: it was released before, or never admitted.
        """
        if sequence not in self._promised:
            refuse("sequence", f"{sequence}, which holds no tokens", "one that was admitted and not yet released")
        tokens = self._promised.pop(sequence)
        self.used -= tokens
        return tokens
