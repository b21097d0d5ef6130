"""Tools for testing samplers and verifiers: inputs, exact laws, chi-square with its power, near-tie-aware
comparison.

For tests, benchmarks and projects that build on specdec; nothing in the package imports it. Needs numpy and
scipy. The laws are plain loops over the published pseudo-code and share no code with any backend."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats

from . import SamplingParams, draft_step, speculative_step

# A backend may decide otherwise than the reference only where the reference's margin is below this.
NEAR_TIE = 1e-4

# By the dtype of the statistic: |difference| <= this * (1 + |lse| + |log q|), a few roundings of l / T - lse.
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-12}

KINDS = ("opposite", "near_equal", "one_hot")


def device_of(backend: str) -> torch.device:
    """Where tests put tensors for ``backend``: the GPU for a GPU backend where there is one, else the CPU."""
    return torch.device("cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")


# ---- Inputs ------------------------------------------------------------------------------------------------


def pair_of_rows(kind: str, num_drafts: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Fixed logits (target [K+1, V], draft [K, V] or None for one-hot drafts) of one of the KINDS, float32."""
    generator = torch.Generator().manual_seed(num_drafts * 1000 + vocabulary)
    ramp = torch.linspace(0, 2.5, vocabulary)
    target = ramp + 0.3 * torch.randn(num_drafts + 1, vocabulary, generator=generator)
    if kind == "one_hot":
        return target, None
    if kind == "opposite":  # the draft likes best what the target likes least
        return target, ramp.flip(0) + 0.3 * torch.randn(num_drafts, vocabulary, generator=generator)
    return target, target[:-1] + 0.1 * torch.randn(num_drafts, vocabulary, generator=generator)


@dataclasses.dataclass
class StepInputs:
    """All arguments of one ``speculative_step``."""

    target_logits: torch.Tensor
    draft_tokens: torch.Tensor
    draft_logits: torch.Tensor | None
    params: SamplingParams
    seed: torch.Tensor
    position: torch.Tensor
    num_drafts: torch.Tensor | None = None
    draft_stats: tuple[torch.Tensor, torch.Tensor] | None = None

    def replace(self, **changes) -> StepInputs:
        return dataclasses.replace(self, **changes)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> StepInputs:
        """The same with ``function`` applied to every tensor, of which dimension 0 is always the batch."""

        def apply(value):
            if isinstance(value, torch.Tensor):
                return function(value)
            if isinstance(value, tuple):
                return tuple(map(function, value))
            if isinstance(value, SamplingParams):
                return SamplingParams(temperature=apply(value.temperature))
            return value

        return StepInputs(**{f.name: apply(getattr(self, f.name)) for f in dataclasses.fields(self)})

    def tensors(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        self.map(lambda t: found.append(t) or t)
        return found

    def run(self, backend: str):
        """The step on ``backend``, its results on the CPU."""
        inputs = self.map(lambda t: t.to(device_of(backend)))
        arguments = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
        return type(result := speculative_step(**arguments, backend=backend))(*(t.cpu() for t in result))

    def reference_margin(self) -> torch.Tensor:
        """[B] relative distance of the reference's closest decision from the other outcome."""
        from .backends import reference

        temperature = torch.as_tensor(self.params.temperature, dtype=torch.float32).expand(self.seed.shape)
        lse = None if self.draft_stats is None else self.draft_stats[1]
        return reference.speculative_step_with_margin(
            self.target_logits, self.draft_tokens, self.draft_logits, lse, self.num_drafts,
            temperature, self.seed, self.position,
        )[1]  # fmt: skip


def random_step(
    batch: int,
    num_drafts: int,
    vocabulary: int,
    *,
    dtype: torch.dtype = torch.float32,
    draft_dtype: torch.dtype | None = None,
    temperature: float | Iterable[float] = 1.0,
    kind: str = "similar",
    stats: bool = False,
    random_state: int = 0,
    drafter: str = "reference",
) -> StepInputs:
    """A random step on the CPU. ``kind``: "similar" (target = draft + noise), "opposite", or "one_hot"
    drafts.

    Drafts are drawn by ``draft_step`` of the backend ``drafter``, as in decoding; of one-hot drafts half are
    the target's favourite. Seeds cover all of int64."""
    generator = torch.Generator().manual_seed(random_state)
    shape = (batch, num_drafts, vocabulary)
    target = 2 * torch.randn((batch, num_drafts + 1, vocabulary), generator=generator)
    noise = torch.randn(shape, generator=generator)
    draft = ((-target[:, :-1] if kind == "opposite" else target[:, :-1]) + noise).to(draft_dtype or dtype)
    target = target.to(dtype)
    seed = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator)
    position = torch.randint(0, 2**31 + 2**20, (batch,), generator=generator)
    if not isinstance(temperature, float):
        temperature = torch.tensor(list(itertools.islice(itertools.cycle(temperature), batch)))
    params = SamplingParams(temperature=temperature)
    if kind == "one_hot":
        tokens = torch.randint(0, vocabulary, shape[:2], generator=generator)
        favourite = torch.rand(shape[:2], generator=generator) < 0.5
        tokens = torch.where(favourite, target[:, :-1].argmax(-1), tokens)
        return StepInputs(target, tokens, None, params, seed, position)
    drawn = [
        draft_step(draft[:, i], params, seed=seed, position=position, offset=i, backend=drafter)
        for i in range(num_drafts)
    ]
    columns = [torch.stack(column, 1) for column in zip(*drawn, strict=True)] if drawn else [torch.zeros(batch, 0)] * 4
    handed_over = (columns[2], columns[3]) if stats else None
    return StepInputs(target, columns[0].long(), draft, params, seed, position, None, handed_over)


def assert_same_step(actual, expected, margin: torch.Tensor, context: str = "") -> int:
    """Tokens, num_accepted and status of each sequence are equal, but for near-ties, whose number is returned."""
    differs = (actual.num_accepted != expected.num_accepted) | (actual.status != expected.status)
    differs |= (actual.tokens != expected.tokens).any(-1)
    wrong = (differs & (margin >= NEAR_TIE)).nonzero().flatten().tolist()
    if wrong:
        b = wrong[0]
        raise AssertionError(
            f"{context}: {len(wrong)} of {len(margin)} sequences differ beyond near-ties; the first is {b} (margin "
            f"{margin[b]:.2e}):\n  got  {[t[b].tolist() for t in actual]}\n  want {[t[b].tolist() for t in expected]}"
        )
    return int(differs.sum())


def assert_statistics_close(actual: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> None:
    """Two log_q or lse vectors are equal up to roundings of numbers of magnitude ``size`` (|lse| + |log q|)."""
    assert actual.dtype == expected.dtype
    off = (actual - expected).abs() / (1 + size.abs())
    off = torch.where((actual == expected) | actual.isnan() & expected.isnan(), 0.0, off)
    assert (off <= TOLERANCES[expected.dtype]).all(), f"relative error {off.max()}"


# ---- Exact laws --------------------------------------------------------------------------------------------

Law = dict[tuple[int, ...], float]  # probability of every sequence of tokens
Model = Callable[[tuple[int, ...]], np.ndarray]  # the probabilities [V] of the next token after a prefix


def probabilities(logits: Iterable[float], temperature: float) -> np.ndarray:
    """softmax(logits / T) in float64; one-hot at the first largest logit for temperature 0."""
    x = np.asarray(logits, dtype=np.float64)
    if temperature == 0:
        return np.eye(len(x))[int(np.argmax(x))]
    # Backends take the temperature as float32, so that is the law's temperature.
    weight = np.exp((x - x.max()) / float(np.float32(temperature)))
    return weight / weight.sum()


def leviathan_law(target: Model, draft: Model, num_drafts: int, prefix: tuple[int, ...] = ()) -> Law:
    """Law of what one step emits: Leviathan et al. 2023, Algorithm 1, line by line, summed over its random choices."""
    law: Law = defaultdict(float)
    vocabulary = len(target(prefix))
    for x in itertools.product(range(vocabulary), repeat=num_drafts):  # x_i ~ q_i
        q = [draft(prefix + x[:i]) for i in range(num_drafts)]
        p = [target(prefix + x[:i]) for i in range(num_drafts + 1)]
        path = float(np.prod([q[i][x[i]] for i in range(num_drafts)]))
        if path == 0:
            continue
        for n in range(num_drafts + 1):  # n = the number of accepted guesses
            if n == num_drafts:
                final, here = p[n], path
            else:
                final = np.maximum(0, p[n] - q[n])
                here = path * (1 - min(1.0, p[n][x[n]] / q[n][x[n]]))
                path *= min(1.0, p[n][x[n]] / q[n][x[n]])
            if here > 0 and final.sum() > 0:
                for t in range(vocabulary):
                    law[x[:n] + (t,)] += here * final[t] / final.sum()
    return dict(law)


def text_law(target: Model, length: int, prefix: tuple[int, ...] = ()) -> Law:
    """Law of the next ``length`` tokens of plain sampling from the target."""
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {
            text + (t,): mass * float(p)
            for text, mass in law.items()
            for t, p in enumerate(target(prefix + text))
            if mass * p > 0
        }
    return law


def completed(law: Law, target: Model, length: int, prefix: tuple[int, ...] = ()) -> Law:
    """``law`` over texts of up to ``length`` tokens, each continued by plain sampling to ``length``."""
    whole: Law = defaultdict(float)
    for text, mass in law.items():
        for rest, p in text_law(target, length - len(text), prefix + text).items():
            whole[text + rest] += mass * p
    return dict(whole)


def total_variation(a: Law, b: Law) -> float:
    return 0.5 * sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in {*a, *b})


# ---- Chi-square --------------------------------------------------------------------------------------------


class ChiSquare(NamedTuple):
    statistic: float
    degrees: int
    p_value: float
    detectable: float  # the relative bias found with power 0.999 at the test's level; see detectable_bias


def chi_square(counts: Law | dict, law: Law, level: float, least: float = 25.0) -> ChiSquare:
    """Pearson's test of ``counts`` against ``law``. Outcomes expected fewer than ``least`` times count as one."""
    if impossible := [k for k in counts if counts[k] and law.get(k, 0.0) == 0]:
        raise AssertionError(f"drawn, though its probability is 0: {impossible[0]}, {counts[impossible[0]]} times")
    draws = sum(counts.values())
    cells, rare = [], np.zeros(2)
    for k, p in law.items():
        if draws * p >= least:
            cells.append((counts.get(k, 0), draws * p))
        else:
            rare += (counts.get(k, 0), draws * p)
    if rare[1] >= least:
        cells.append(tuple(rare))
    observed, expected = np.array(cells, dtype=np.float64).T
    statistic, degrees = float(((observed - expected) ** 2 / expected).sum()), len(cells) - 1
    return ChiSquare(
        statistic, degrees, float(stats.chi2.sf(statistic, degrees)), detectable_bias(draws, degrees, level)
    )


@functools.cache
def detectable_bias(draws: int, degrees: int, level: float, power: float = 0.999) -> float:
    """The smallest d such that probabilities off by a factor 1 +- d each are found with this power.

    Pearson's statistic is then noncentral chi-square with noncentrality draws * d^2.
    """
    threshold, low, high = stats.chi2.isf(level, degrees), 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        found = stats.ncx2.sf(threshold, degrees, draws * middle**2) >= power
        low, high = (low, middle) if found else (middle, high)
    return high
