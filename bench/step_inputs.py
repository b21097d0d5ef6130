"""Random logits and drafts drawn from them, in several sets that calls take in turn."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cached_property

import torch
from cases import DTYPES, Shape
from machine import cache_bytes
from measure import Method
from peers import filtered, probabilities

from specdec_kernels import SamplingParams, SpeculativeStep, draft_step, speculative_step

ACCEPTANCE = {"typical": 0.8, "all_accepted": 1.0}
LOGIT_STD = 2.0
# q = p exp(noise): normal noise of standard deviation s gives alpha = 2 - 2 Phi(s / 2), which is 0.8 here.
TYPICAL_NOISE_STD = 0.507
DRAFTED_AT = 7  # position of all drafts
MOST_SETS = 512  # a CUDA graph holds one call on each


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

    # Some peers get these ready-made, so that making them is not timed.

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
            return speculative_step(
                self.target[n],
                self.tokens[n],
                None if self.rule == "coupled" else self.draft[n],
                params=self.params,
                seed=self.seed[n],
                position=self.position[i],
                draft_stats=(self.cutoff[n], self.lse[n]) if stats else None,
                rule=self.rule,
                backend=backend,
            )

        return run

    def num_accepted(self, backend: str) -> torch.Tensor:
        """[calls * B]: what the calls accept, by our step. The peers draw other numbers from the same distribution."""
        run = self.ours(backend, stats=self.rule != "coupled")
        return torch.cat([run(i).num_accepted for i in range(self.calls)])
