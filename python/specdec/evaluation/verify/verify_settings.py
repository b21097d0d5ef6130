"""What is verified: which drafters, under which rules, with how many drafts, in which batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from specdec_kernels import Rule

from ...checks import read_count, refuse
from ...loop.draft_length import AdaptiveDrafts

CHECKS = ("greedy", "coupled", "distribution")
RULES = tuple(rule.value for rule in Rule)
NumDrafts = int | Literal["auto"]


@dataclass(frozen=True)
class VerifySettings:
    """
    Args:
        checks: what is checked, of CHECKS.
        rules: of ``specdec_kernels.Rule``, each once.
        num_drafts: values of K, each >= 1, or "auto" (``AdaptiveDrafts``).
        batch_sizes: each >= 1.
        max_new_tokens: of every text that is compared, >= 1.
        samples: how many texts every test of the distribution draws, >= 100.
        sampled_tokens: length of these texts, >= 1. Each of their positions is tested, given the tokens before it.
        temperature: of all sampled texts, > 0.
        level: the probability that a correct loop fails any test of the distribution in the whole run.
        seed: of the first text; each further text has the next one.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """

    checks: Sequence[str] = CHECKS
    rules: Sequence[str] = RULES
    num_drafts: Sequence[NumDrafts] = (1, 4)
    batch_sizes: Sequence[int] = (1, 8)
    max_new_tokens: int = 32
    samples: int = 2048
    sampled_tokens: int = 3
    temperature: float = 1.0
    level: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        for rule in self.rules:
            Rule(rule)  # refuses others
        for check in self.checks:
            if check not in CHECKS:
                refuse("checks", repr(check), ", ".join(CHECKS))
        for name in ("checks", "rules", "num_drafts", "batch_sizes"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                refuse(name, repr(values), "at least one, each once")
        for k in self.num_drafts:
            if k != "auto" and read_count("num_drafts", k) < 1:
                refuse("num_drafts", k, 'integers >= 1, or "auto"')
        counts = [("batch_sizes", size, 1) for size in self.batch_sizes]
        counts += [(name, getattr(self, name), 1) for name in ("max_new_tokens", "sampled_tokens")]
        for name, value, least in (*counts, ("samples", self.samples, 100)):
            read_count(name, value, least)
        if not 0 < self.temperature < math.inf:
            refuse("temperature", self.temperature, "a finite number > 0")
        if not 0 < self.level < 1:
            refuse("level", self.level, "a number between 0 and 1")


@dataclass(frozen=True)
class Cell:
    """One way to decode, and how it is checked."""

    check: Literal["greedy", "coupled", "distribution"]
    drafter: str
    rule: str
    num_drafts: NumDrafts  # 0 without a drafter
    batch_size: int

    @property
    def name(self) -> str:
        return f"{self.drafter}, {self.rule}, K = {self.num_drafts}, B = {self.batch_size}"

    def drafts(self) -> int | AdaptiveDrafts:
        """K as ``SpeculativeDecoder`` takes it."""
        return self.num_drafts if isinstance(self.num_drafts, int) else AdaptiveDrafts()


def cells(drafters: Mapping[str, object], settings: VerifySettings) -> list[Cell]:
    """All cells of a run."""
    return [cell for cell in _all_cells(drafters, settings) if cell.check in settings.checks]


def _all_cells(drafters: Mapping[str, object], settings: VerifySettings) -> Iterator[Cell]:
    """Greedy texts: every drafter with every K and batch size; the rules, which are one rule at temperature 0, take
    turns, so that every drafter meets each. Rule ``coupled``: every drafter with every K. The distribution: every
    drafter under every other rule, and plain decoding; under ``coupled`` the text is plain decoding's, so one drafter
    stands for all."""
    s, coupled_distribution = settings, True
    for d, (name, drafter) in enumerate(drafters.items()):
        amounts: Sequence[NumDrafts] = (0,) if drafter is None else s.num_drafts
        settings_of = [(k, size) for size in s.batch_sizes for k in amounts]
        for i in range(max(len(settings_of), len(s.rules))):
            yield Cell("greedy", name, s.rules[(i + d) % len(s.rules)], *settings_of[i % len(settings_of)])
        if "coupled" in s.rules:
            for i, k in enumerate(amounts):
                yield Cell("coupled", name, "coupled", k, s.batch_sizes[-1 - i % len(s.batch_sizes)])
        numbers = [k for k in amounts if isinstance(k, int)]
        largest: NumDrafts = max(numbers) if numbers else "auto"
        for rule in s.rules if drafter is not None else s.rules[:1]:
            if rule != "coupled" or coupled_distribution:
                coupled_distribution &= rule != "coupled"
                yield Cell("distribution", name, rule, largest, SAMPLED_AT_ONCE)


SAMPLED_AT_ONCE = 64
