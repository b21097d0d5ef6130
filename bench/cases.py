"""The one table of cases that ``bench_kernels.py`` times, by group, and the bytes that each of them has to read."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import torch
from specdec.checks import refuse

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FASTER = {"flashinfer": 3.0, "transformers": 10.0}  # a goal of every case of the group `goals`: so many times


@dataclass(frozen=True)
class Shape:
    """B sequences, K drafts and V logits a row. K is 0 where one draft is drawn."""

    B: int
    K: int
    V: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        return self.V * DTYPES[self.dtype].itemsize

    def bytes_all_rows(self, stats: bool, rule: str = "token") -> int:
        """The bytes of every row that may be needed: K+1 of the target and K of the draft. With the draft's statistics
        handed over, one row of the draft is enough, that of the rejected position. Rule ``block`` needs all of the
        draft's rows for its residuals, ``coupled`` none."""
        of_draft = {"token": 1 if stats else self.K, "block": self.K, "coupled": 0}[rule]
        return self.B * (self.K + 1 + of_draft) * self.row_bytes

    def bytes_reached_rows(self, stats: bool, num_accepted: torch.Tensor, rule: str = "token") -> float:
        """The mean bytes of the rows up to the first rejection, which is the least that decides steps that accept so
        many. Rule ``block`` also reads the rows after it."""
        if rule == "block":
            return float(self.bytes_all_rows(stats, rule))
        n = num_accepted.double()
        draft_rows = (n < self.K).double() if stats else (n + 1).clamp(max=self.K)
        draft_rows = draft_rows * (rule != "coupled")
        return self.B * (n + 1 + draft_rows).mean().item() * self.row_bytes


@dataclass(frozen=True)
class Goal:
    """What a case of the group `goals` is to reach on an H200."""

    seconds: float | None = None  # of device time with cold caches, at most
    bandwidth: float | None = None  # as a part of the measured copy bandwidth, at least
    launches: int | None = None  # at most


@dataclass(frozen=True)
class Case:
    """One setting of ``speculative_step``, or with K = 0 of ``draft_step``."""

    name: str
    shape: Shape
    rule: str = "token"
    filters: dict[str, float] = field(default_factory=dict)
    temperature: float = 1.0
    stats: tuple[bool, ...] = (False, True)  # whether the draft's (cutoff, lse) are handed over; each is timed
    peers: tuple[str, ...] | None = None  # the names of those that are timed beside it; None: all
    goal: Goal | None = None


FILTERS = {
    "none": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "top_k+top_p": {"top_k": 50, "top_p": 0.95},
}


def _goal(name: str, shape: tuple[int, int, int], goal: Goal, rule: str = "token", filters: str = "none") -> Case:
    return Case(name, Shape(*shape, "bfloat16"), rule, FILTERS[filters], 0.8, (True,), goal=goal)


def _setting(shape: Shape, rule: str, filters: str) -> Case:
    stats = (False,) if rule == "coupled" else (False, True)
    peers = ("transformers",) if rule == "token" else ()
    return Case(f"{rule} {filters}", shape, rule, FILTERS[filters], stats=stats, peers=peers)


GOALS = (
    _goal("latency", (1, 5, 128256), Goal(seconds=8e-6, launches=1)),
    _goal("few", (8, 5, 151936), Goal(seconds=10e-6)),
    _goal("token", (32, 8, 128256), Goal(seconds=25e-6)),
    _goal("block", (32, 8, 128256), Goal(seconds=42e-6), "block"),
    _goal("filters", (32, 8, 128256), Goal(seconds=40e-6), filters="top_k+top_p"),
    _goal("many", (256, 4, 151936), Goal(bandwidth=0.9)),
)
SETTINGS = (
    *(("token", filters) for filters in FILTERS),
    *(("block", "none"), ("coupled", "none"), ("block", "top_k+top_p"), ("coupled", "top_k+top_p")),
)
GROUPS = ("goals", "step", "settings", "draft")


def rows_of(group: str, batches: list[int] | None, dtypes: list[str] | None, quick: bool) -> list[list[Case]]:
    """The cases of a group. Those of one row have one shape and are timed in the same rounds, so that they can be
    compared.

    Args:
        batches, dtypes: None: those of the group. The goals' shapes are fixed.
        quick: with short rows and few shapes.
    """
    if group == "goals":
        if batches or dtypes:
            refuse("batches and dtypes", "some", "none, as the goals have their own")
        return [[_quick(case) if quick else case] for case in GOALS]
    settings = group == "settings"
    dtypes = dtypes or (["float32"] if settings else ["bfloat16", "float32"])
    num_drafts = [0] if group == "draft" else [5] if settings or quick else [5, 1, 8]
    vocabularies = [1000] if quick else [128256] if settings else [128256, 32000, 151936]  # Llama 3, Llama 2, Qwen
    batches = batches or ([1] if settings and quick else [8, 1] if settings else [1, 8] if quick else [1, 8, 32])
    shapes = [Shape(B, K, V, t) for t, K, V, B in itertools.product(dtypes, num_drafts, vocabularies, batches)]
    return [[_setting(s, *pair) for pair in SETTINGS] if settings else [Case(group, s)] for s in shapes]


def _quick(case: Case) -> Case:
    shape = case.shape
    return replace(case, shape=Shape(min(shape.B, 2), shape.K, shape.V // 100, shape.dtype))
