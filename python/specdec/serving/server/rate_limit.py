"""How many requests an owner may send in a minute."""

from __future__ import annotations

from collections import deque

MINUTE = 60.0  # seconds


class RateLimit:
    """Admits at most ``most`` requests of each owner in any minute. What was refused does not count.

    Args:
        most: >= 1.
    """

    def __init__(self, most: int):
        self._most = most
        self._admitted: dict[str, deque[float]] = {}  # when the newest were; as many owners as there are keys

    def wait(self, owner: str, now: float) -> float:
        """Returns after how many seconds the next request of ``owner`` is admitted. 0: this one is."""
        times = self._admitted.setdefault(owner, deque(maxlen=self._most))
        if len(times) == self._most and (left := times[0] + MINUTE - now) > 0:
            return left
        times.append(now)
        return 0.0
