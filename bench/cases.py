"""The one table of cases that ``bench_kernels.py`` times, by group, the bytes that each has to read, and its inputs."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from measure import Method
from peers import filtered, probabilities
from report import cache_bytes, refuse

from specdec_kernels import SamplingParams, SpeculativeStep, draft_step, speculative_step

ACCEPTANCE = {"typical": 0.8, "all_accepted": 1.0}
LOGIT_STD = 2.0
# q = p exp(noise): normal noise of standard deviation s gives alpha = 2 - 2 Phi(s / 2), which is 0.8 here.
TYPICAL_NOISE_STD = 0.507
DRAFTED_AT = 7  # position of all drafts
MOST_SETS = 512  # a CUDA graph holds one call on each
VOCABULARIES = [128256, 32000, 50257, 151936]  # Llama 3, Llama 2, GPT-2, Qwen
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
class Case:
    """One setting of ``speculative_step``, or with K = 0 of ``draft_step``."""

    name: str
    shape: Shape
    rule: str = "token"
    filters: dict[str, float] = field(default_factory=dict)
    temperature: float = 1.0
    stats: tuple[bool, ...] = (False, True)  # whether the draft's (cutoff, lse) are handed over; each is timed
    peers: tuple[str, ...] | None = None  # the names of those that are timed beside it; None: all
    goal: dict[str, float] = field(default_factory=dict)  # what it is to reach on an H200, see README.md


FILTERS = {
    "none": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "top_k+top_p": {"top_k": 50, "top_p": 0.95},
}


def _goal(
    name: str, shape: tuple[int, ...], goal: dict[str, float], rule: str = "token", filters: str = "none"
) -> Case:
    return Case(name, Shape(*shape, "bfloat16"), rule, FILTERS[filters], 0.8, (True,), goal=goal)


def _setting(shape: Shape, rule: str, filters: str) -> Case:
    stats = (False,) if rule == "coupled" else (False, True)
    peers = ("transformers",) if rule == "token" else ()
    return Case(f"{rule} {filters}", shape, rule, FILTERS[filters], stats=stats, peers=peers)


GOALS = (
    _goal("latency", (1, 5, 128256), {"seconds": 8e-6, "launches": 2}),
    _goal("few", (8, 5, 151936), {"seconds": 10e-6}),
    _goal("token", (32, 8, 128256), {"seconds": 25e-6}),
    _goal("block", (32, 8, 128256), {"seconds": 35e-6}, "block"),
    _goal("filters", (32, 8, 128256), {"seconds": 35e-6}, filters="top_k+top_p"),
    _goal("many", (256, 4, 151936), {"seconds": 110e-6}),
)
SETTINGS = (
    *(("token", filters) for filters in FILTERS),
    *(("block", "none"), ("coupled", "none"), ("block", "top_k+top_p"), ("coupled", "top_k+top_p")),
)
GROUPS = ("goals", "step", "settings", "draft")


def rows_of(
    group: str,
    batches: list[int] | None,
    dtypes: list[str] | None,
    quick: bool,
    vocabularies: list[int] | None = None,
    num_drafts: list[int] | None = None,
) -> list[list[Case]]:
    """The cases of a group. Those of one row have one shape and are timed in the same rounds, so that they can be
    compared.

    Args:
        batches, dtypes, vocabularies, num_drafts: None: those of the group. The goals' shapes are fixed.
        quick: with short rows and few shapes.
    """
    if group == "goals":
        if batches or dtypes or vocabularies or num_drafts:
            refuse("batches, dtypes, vocabularies and drafts", "some", "none, as the goals have their own")
        return [[_quick(case) if quick else case] for case in GOALS]
    if group == "draft" and num_drafts:
        refuse("drafts", num_drafts, "none in the group draft, which draws one")
    settings = group == "settings"
    dtypes = dtypes or (["float32"] if settings else ["bfloat16", "float32"])
    num_drafts = [0] if group == "draft" else num_drafts or ([5] if settings or quick else [5, 8])
    vocabularies = vocabularies or ([1000] if quick else [128256] if settings else VOCABULARIES)
    batches = batches or ([1] if settings and quick else [8, 1] if settings else [1, 8] if quick else [1, 8, 32])
    shapes = [Shape(B, K, V, t) for t, K, V, B in itertools.product(dtypes, num_drafts, vocabularies, batches)]
    return [[_setting(s, *pair) for pair in SETTINGS] if settings else [Case(group, s)] for s in shapes]


def _quick(case: Case) -> Case:
    shape = case.shape
    return replace(case, shape=Shape(min(shape.B, 2), shape.K, shape.V // 100, shape.dtype))


# ---- Random logits, and drafts drawn from them


class StepInputs:
    """``sets`` independent steps, of K >= 0 drafts. Calls take them in turn, and together they exceed the caches."""

    def __init__(self, shape: Shape, drafts: str, temperature: float, device: torch.device, most_sets: int):
        B, K, V = shape.B, shape.K, shape.V
        self.shape, self.temperature = shape, temperature
        # What calls read must exceed the caches, and that is at least the target's rows up to a rejection.
        reached = B * shape.row_bytes * sum(ACCEPTANCE[drafts] ** i for i in range(K + 1))
        wanted = math.ceil(2 * cache_bytes(device) / reached)
        self.sets = N = min(wanted, most_sets)
        self.exceed_cache = wanted <= N
        # A step's work depends on where it rejects. With 16 sequences or more, no single one decides the median.
        self.calls = max(N, math.ceil(16 / B))
        torch.manual_seed(0)
        dtype, like = DTYPES[shape.dtype], {"device": device}
        self.target = torch.empty(N, B, K + 1, V, dtype=dtype, **like)
        self.draft = torch.empty(N, B, K, V, dtype=dtype, **like)
        noise_std = TYPICAL_NOISE_STD * temperature if drafts == "typical" else 0.0
        for n in range(N):  # one set at a time, as float32 noise for all would need several times their memory
            self.target[n] = torch.randn(B, K + 1, V, **like) * LOGIT_STD
            self.draft[n] = self.target[n, :, :-1].float() + noise_std * torch.randn(B, K, V, **like)
        self.seed = torch.arange(N * B, **like).view(N, B)
        self.noise = self.seed[:, :1]  # for peers that take one number
        self.position = [torch.full((B,), 1000 * i, **like) for i in range(self.calls)]
        self._draw({}, "token")

    def _draw(self, filters: dict[str, float], rule: str) -> None:
        (B, K, V), N = (self.shape.B, self.shape.K, self.shape.V), self.sets
        values = {"temperature": self.temperature} | filters
        columns = {name: torch.full((B,), value, device=self.draft.device) for name, value in values.items()}
        self.params, self.rule, self.filters = SamplingParams(**columns), rule, filters
        if K == 0:
            return
        # Drafts come from other noise than the calls use, so a set that is used twice is still a fair sample.
        flat, params, seed = self.draft.view(N * B, K, V), SamplingParams(**values), self.seed.view(-1)
        steps = [draft_step(flat[:, i], params, seed=seed, position=DRAFTED_AT, offset=i, rule=rule) for i in range(K)]
        self.tokens, self.cutoff, self.lse = (
            torch.stack([getattr(s, name) for s in steps], 1).view(N, B, K) for name in ("tokens", "cutoff", "lse")
        )

    def with_settings(self, filters: dict[str, float], rule: str) -> StepInputs:
        """The same logits under these filters (SamplingParams' names) and this rule."""
        inputs = copy.copy(self)
        for name in ("tokens_int32", "draft_float32", "draft_probs", "target_probs"):
            inputs.__dict__.pop(name, None)  # were made for other drafts and filters
        inputs._draw(filters, rule)
        if rule == "coupled":  # draft and target share the noise of a position
            inputs.position = [torch.full_like(p, DRAFTED_AT) for p in self.position]
        return inputs

    @cached_property
    def tokens_int32(self) -> torch.Tensor:
        return self.tokens.int()

    @cached_property
    def draft_float32(self) -> torch.Tensor:
        """The draft's logits with the filters that its drafts were drawn under, not divided by the temperature."""
        if not self.filters:
            return self.draft.float()
        t = self.temperature
        return torch.stack([filtered(d.float() / t, self.filters) * t for d in self.draft])

    def leaves_nothing(self) -> bool:
        """Whether transformers' filters exclude a draft of a row with q = p. (Of equal logits at the cutoff they keep
        some, and ours all.) With p(x) = q(x) = 0 its ratio is NaN, which rejects the draft, and then the residual has
        no mass to draw from. On a GPU, torch.multinomial's assertion ends the whole process."""
        excluded = self.draft_float32.gather(-1, self.tokens[..., None])[..., 0] == -math.inf
        return bool((self.draft[excluded] == self.target[:, :, :-1][excluded]).all(-1).any())

    @cached_property
    def draft_probs(self) -> torch.Tensor:
        return probabilities(self.draft_float32 if self.filters else self.draft, self.temperature)

    @cached_property
    def target_probs(self) -> torch.Tensor:
        return probabilities(self.target, self.temperature)

    def arguments(self, *names: str) -> Callable[[int], list[torch.Tensor]]:
        """What ``step(*arguments(i))`` gets in call i: the named tensors' set of that call."""
        tensors = [getattr(self, name) for name in names]
        return lambda i: [t[i % self.sets] for t in tensors]

    def method(self, name: str, backend: str, stats: bool) -> Method:
        """Our step as a method to time."""
        runs = (self.ours(backend, stats, warm) for warm in (False, True))
        return Method(name, next(runs), self.calls, capturable=backend != "reference", warm=next(runs))

    def ours(self, backend: str, stats: bool, warm: bool = False) -> Callable[[int], SpeculativeStep]:
        """``warm``: always on the first set. Each call has other noise, so that it accepts other drafts."""

        def run(i: int):
            n, i = 0 if warm else i % self.sets, i % self.calls
            draft = None if self.rule == "coupled" else self.draft[n]
            noise = {"seed": self.seed[n], "position": self.position[i]}
            settings = {"params": self.params, "rule": self.rule, "backend": backend}
            given = (self.cutoff[n], self.lse[n]) if stats else None
            return speculative_step(self.target[n], self.tokens[n], draft, **noise, **settings, draft_stats=given)

        return run

    def num_accepted(self, backend: str) -> torch.Tensor:
        """[calls * B]: what the calls accept, by our step. The peers draw other numbers from the same distribution."""
        run = self.ours(backend, stats=self.rule != "coupled")
        return torch.cat([run(i).num_accepted for i in range(self.calls)])
