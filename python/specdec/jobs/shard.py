"""A part of a job's prompts, for one of several processes that share nothing but the input file."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Every ``count``-th prompt of a file, from ``index`` on, so that a file sorted by length gives each as much to do.

    Attributes:
        index: 0 to ``count`` - 1, as Slurm's arrays and Kubernetes' indexed jobs count.
        count: how many there are, at least 1.
    """

    index: int = 0
    count: int = 1

    @staticmethod
    def parse(text: str) -> Shard:
        """Reads "i/n". Raises ValueError."""
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
        index, count = map(int, found.groups()) if found else (0, 0)
        if index >= count:
            raise ValueError(f"got {text!r}, allowed: i/n, a number from 0 and how many there are: 0/4 to 3/4")
        return Shard(index, count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def has(self, prompt: int) -> bool:
        """Whether the prompt of this number in the file, from 0, is one of these."""
        return prompt % self.count == self.index

    def size(self, prompts: int) -> int:
        """How many of a file with so many prompts are these."""
        return len(range(self.index, prompts, self.count))


WHOLE = Shard()
