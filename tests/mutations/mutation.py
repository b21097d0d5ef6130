"""What a mutation is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutation(NamedTuple):
    """``old``, which occurs once in ``file``, becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    first: str  # pytest's arguments for the tests that are likely to see it; the others follow

    @property
    def native(self) -> bool:
        """Whether the extension is to be built anew. Tests compile the kernels for GPUs themselves."""
        return self.file.startswith("csrc/") and "/cuda/" not in self.file

    def applied(self, text: str) -> str:
        """
        Raises:
            ValueError: the old text does not occur exactly once.
        """
        if (times := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its old text occurs {times} times in {self.file}")
        return text.replace(self.old, self.new)


def mutations(file: str, first: str, bugs: Mapping[str, tuple[str, ...]]) -> list[Mutation]:
    """Of one file: ``bugs`` maps names to (old, new), or (old, new, other tests to try first)."""
    return [Mutation(name, file, old, new, *(other or [first])) for name, (old, new, *other) in bugs.items()]
