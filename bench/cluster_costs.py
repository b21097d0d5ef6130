"""What a job of texts takes on some processes, from the seconds that things take in one: the arithmetic of
``predict_cluster.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple


class Text(NamedTuple):
    """Tokens that are read of a prompt, and those of the text that continues it."""

    prompt: int
    new: int


@dataclass(frozen=True)
class Costs:
    """Seconds that things take in one process.

    Attributes:
        steps: a step with 1, 2, ... busy rows, as many as it has.
        tau: tokens of a row in a step.
        token: to read a token of a prompt.
        prompt: a prompt, beside its tokens and its steps.
    """

    steps: Sequence[float]
    tau: float
    token: float
    prompt: float = 0.0

    def of_job(self, texts: Sequence[Text]) -> float:
        """A process that does these: each begins in the first row that is free, and at the end rows run dry."""
        seconds, step = 0.0, 0
        ends: list[int] = []  # the steps after which the texts in the rows end
        coming = iter(texts)
        while True:
            while len(ends) < len(self.steps) and (text := next(coming, None)) is not None:
                seconds += self.prompt + self.token * text.prompt
                heappush(ends, step + max(1, round(text.new / self.tau)))
            if not ends:
                return seconds
            seconds += (ends[0] - step) * self.steps[len(ends) - 1]
            step = ends[0]
            while ends and ends[0] == step:
                heappop(ends)

    def of_text(self, text: Text) -> float:
        """A text's share of a process whose rows are always busy."""
        return self.prompt + self.token * text.prompt + text.new / self.tau * self.steps[-1] / len(self.steps)


def together(works: Sequence[float], cores: int, slowdown: Mapping[int, float]) -> float:
    """Seconds until the last of processes ends that share some cores equally.

    Args:
        works: what each takes alone.
        slowdown: of one process by how many run side by side on cores of their own. It holds for more as well, up to
            the next number.
    """
    left, seconds = sorted(works, reverse=True), 0.0
    while left:
        busy = min(len(left), cores)
        shortest = left.pop()
        seconds += shortest * slowdown[max(n for n in slowdown if n <= busy)] * (len(left) + 1) / busy
        left = [work - shortest for work in left]
    return seconds
