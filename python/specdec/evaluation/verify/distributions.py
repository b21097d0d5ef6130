"""Whether sampled texts have the target's distribution: chi-square tests of many short texts after one prompt."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import DynamicCache, PreTrainedModel

from specdec_kernels import SamplingParams

from ...decoder import SpeculativeDecoder
from ...models.cache.kv_cache import cache_argument
from ...models.forward.recurrent import recurrent_layers
from ...stats import Stats
from ..contenders import Prompt
from .chi_square import ChiSquare, chi_square
from .text_check import trouble
from .verify_settings import SAMPLED_AT_ONCE, Cell, VerifySettings

RANKS = 32  # intervals of the test of ranks; fewer where there are few texts
PAIRS = 8  # the same for two positions, along either
PREFIXES = 8  # after how many of the most frequent beginnings the next token is tested
LEAST = 100  # texts that the test after one beginning needs
TAILS = (2, 4, 6)  # how many tokens at the end of a prompt make a scene (see ``scenes``)


@dataclass(frozen=True)
class DistributionTest:
    """One chi-square test.

    ``tokens`` counts the token at ``position`` of the texts that begin with ``prefix``. ``ranks`` counts, over all
    texts, where the token lies in the order from likely to unlikely: the probability of all likelier tokens together,
    plus a random part of its own, is uniform whatever came before (Rosenblatt 1952). That finds biases for or against
    likely tokens, also after beginnings that are too rare for a test of their own. ``pairs`` counts the ranks at
    ``position`` and after it together: given the first, the second is uniform, unless noise was used twice.
    """

    kind: Literal["tokens", "ranks", "pairs"]
    scene: int | None  # index into ``DistributionResult.scenes``; None for all of them together
    position: int
    prefix: tuple[int, ...]
    draws: int
    degrees: int
    p_value: float
    level: float
    detectable: float  # the relative bias found with power 0.999; infinite where there is only one outcome
    worst: int | None  # the token, or the interval, that adds most to the statistic
    variation: float  # the total variation between counts and law, over the outcomes of the test
    by_chance: float  # how large that is on average if the law is right

    @property
    def passed(self) -> bool:
        return self.p_value > self.level

    def to_dict(self) -> dict:
        finite = self.detectable if self.degrees else None  # JSON has no infinity
        return {**dataclasses.asdict(self), "detectable": finite, "passed": self.passed}


@dataclass(frozen=True)
class DistributionResult:
    cell: Cell
    scenes: list[list[int]]  # the prompts of the texts, as token ids
    samples: int
    tests: list[DistributionTest]
    stats: Stats
    error: str | None  # why the drafter was dropped, or which logits had no distribution

    @property
    def bugs(self) -> list[DistributionTest]:
        return [test for test in self.tests if not test.passed]

    def to_dict(self) -> dict:
        s = self.stats
        return {
            **dataclasses.asdict(self.cell),
            **{"scenes": self.scenes, "samples": self.samples, "bugs": len(self.bugs)},
            **{"drafted": s.drafted, "accepted": s.accepted, "alpha": s.alpha, "tau": s.tau},
            "tests": [test.to_dict() for test in self.tests],
            "error": self.error,
        }


class DistributionCheck:
    """
    Args:
        target: gives the expected distribution, by plain forwards over transformers' own cache.
        prompts: see :func:`scenes`.
        settings: ``samples``, ``sampled_tokens``, ``temperature``, and ``seed`` of the first text.
        level: the probability of a false alarm in one cell, all its tests together.
    """

    def __init__(self, target: PreTrainedModel, prompts: Sequence[Prompt], settings: VerifySettings, level: float):
        self._settings, self._level = settings, level
        self._scenes = scenes(target, prompts, settings) if "distribution" in settings.checks else []

    def run(self, cell: Cell, decoder: SpeculativeDecoder) -> DistributionResult:
        s, count = self._settings, len(self._scenes)
        texts: list[list[tuple[int, ...]]] = [[] for _ in self._scenes]
        stats, error = [], None
        for start in range(0, s.samples, SAMPLED_AT_ONCE):
            seeds = [s.seed + i for i in range(start, min(start + SAMPLED_AT_ONCE, s.samples))]
            prompts = [self._scenes[i % count].prompt for i in range(len(seeds))]
            # No token ends a text here, or texts would have different lengths.
            result = decoder.generate(
                prompts, None, s.sampled_tokens, SamplingParams(s.temperature), seeds, [], rule=cell.rule
            )
            for i, tokens in enumerate(result.tokens):
                texts[i % count].append(tuple(tokens))
            stats.append(result.stats)
            error = error or trouble(result)
        tests = all_tests(texts, self._scenes, s.sampled_tokens, self._level)
        whole = Stats.total(stats, max(len(part.drafted_by_position) for part in stats))
        return DistributionResult(cell, [scene.prompt for scene in self._scenes], s.samples, tests, whole, error)


def scenes(
    target: PreTrainedModel,
    prompts: Sequence[Prompt],
    settings: VerifySettings,
    allowed: torch.Tensor | None = None,
    usable: Callable[[Prompt], bool] = lambda prompt: True,
) -> list[PlainDistribution]:
    """The prompts of sampled texts: ends of the given prompts, written twice so that drafters that look back have
    something to propose. Two are taken: the one after which most tokens come often enough to be counted one by one, and
    the one after which the repeated token has a probability nearest to one half. ``allowed``: see
    :class:`PlainDistribution`; ``usable`` says which prompts can be taken at all."""
    found = []
    for tail in sorted({tuple(prompt[-n:]) for prompt in prompts for n in TAILS}):
        if not usable([*tail, *tail]):
            continue
        distribution = PlainDistribution(target, [*tail, *tail], settings.temperature, allowed)
        p = distribution.after([()])[0][0, 0].exp()
        counted, again = int((p * settings.samples / 2 >= 25).sum()), p[tail[0]].item()
        found.append((distribution, counted, abs(again - 0.5)))
    most, evenly = max(found, key=lambda scene: scene[1]), min(found, key=lambda scene: scene[2])
    return [most[0]] if most is evenly else [most[0], evenly[0]]


def all_tests(
    texts: list[list[tuple[int, ...]]],
    distributions: list[PlainDistribution],
    length: int,
    level: float,
    pairs: bool = False,
) -> list[DistributionTest]:
    """All tests of texts of up to ``length`` tokens, whose levels add up to ``level`` at most. Each position has a test
    of ranks, with ``pairs`` one of it and the next, and several of tokens; either kind gets half of the level. The
    number of tests of tokens depends on earlier positions alone, so dividing the level by it is allowed."""
    of_ranks = 2 * length - 1 if pairs else length
    tests = rank_tests(texts, distributions, level / 2 / of_ranks, pairs)
    for position in range(length):
        tests += token_tests(texts, position, distributions, level / 2 / length)
    return tests


def token_tests(
    texts: list[list[tuple[int, ...]]], position: int, distributions: list[PlainDistribution], level: float
) -> list[DistributionTest]:
    """Tests of the token at ``position``, after each of the most frequent beginnings of the texts."""
    begun = Counter((i, text[:position]) for i, of in enumerate(texts) for text in of if len(text) > position)
    chosen = [beginning for beginning, count in begun.most_common(PREFIXES) if count >= LEAST or not position]
    tests = []
    for i, prefix in chosen:
        counts = Counter(text[position] for text in texts[i] if len(text) > position and text[:position] == prefix)
        log_p, error = distributions[i].after([prefix])
        probabilities = dict(enumerate(log_p[0, -1].exp().tolist()))
        mine = level / len(chosen)
        result = chi_square(counts, probabilities, mine, tolerance=error[0, -1].item())
        tests.append(_test("tokens", i, position, prefix, sum(counts.values()), result, mine))
    return tests


def rank_tests(
    texts: list[list[tuple[int, ...]]], distributions: list[PlainDistribution], level: float, pairs: bool = False
) -> list[DistributionTest]:
    """One test of each position, over all texts of all scenes; with ``pairs`` also one of each two positions."""
    whole, errors = _all_ranks(texts, distributions)
    columns, tests = min(RANKS, len(whole) // 25), []
    uniform = dict.fromkeys(range(columns), 1 / columns)
    for i in range(len(errors)):
        rank = whole[:, i][~whole[:, i].isnan()]
        counts = _intervals(rank, columns).bincount(minlength=columns)
        result = chi_square(_counted(counts), uniform, level, 0.5, _tolerance(errors[i], len(rank)))
        tests.append(_test("ranks", None, i, (), len(rank), result, level))
    for i in range(len(errors) - 1 if pairs else 0):
        tests.append(_pair_test(i, whole[:, i : i + 2], errors[i + 1], level))
    return tests


def _pair_test(position: int, ranks: torch.Tensor, error: torch.Tensor, level: float) -> DistributionTest:
    """Whether the second of two ranks [n, 2] is uniform, whatever the first one is. The first one alone is not, among
    texts that have a second: where many texts end after a token, few pairs begin with it."""
    both = ranks[~ranks.isnan().any(1)]
    columns = max(1, min(PAIRS, int((len(both) / 25) ** 0.5)))
    first, second = (_intervals(rank, columns) for rank in both.unbind(1))
    counts = (first * columns + second).bincount(minlength=columns**2).view(columns, columns)
    begun = [row for row in range(columns) if counts[row].any()]
    expected = (counts.sum(1, keepdim=True).double() / columns / max(len(both), 1)).expand_as(counts)
    uniform = {row * columns + i: float(expected[row, i]) for row in begun for i in range(columns)}
    tolerance = _tolerance(error, len(both))
    result = chi_square(_counted(counts.flatten()), uniform, level, 0.0, tolerance, max(len(begun), 1))
    return _test("pairs", None, position, (), len(both), result, level)


def _intervals(ranks: torch.Tensor, columns: int) -> torch.Tensor:
    return (ranks * columns).long().clamp(max=columns - 1)


def _counted(counts: torch.Tensor) -> dict[int, int]:
    return dict(enumerate(counts.tolist()))


def _tolerance(squared_errors: torch.Tensor, draws: int) -> float:
    return (squared_errors / max(draws, 1)).sqrt().item()


def _all_ranks(
    texts: list[list[tuple[int, ...]]], distributions: list[PlainDistribution]
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, length] ranks of the tokens of all texts, NaN after a text's end, and [length] the squared errors, summed."""
    length = max(len(text) for of in texts for text in of)
    errors, rows = torch.zeros(length, dtype=torch.float64), []
    generator = torch.Generator().manual_seed(0)
    for of, distribution in zip(texts, distributions, strict=True):
        for size in {len(text) for text in of} - {0}:  # a text is shorter where faulty logits or an end ended it
            alike = [text for text in of if len(text) == size]
            for start in range(0, len(alike), SAMPLED_AT_ONCE):
                rank, error = _ranks(alike[start : start + SAMPLED_AT_ONCE], distribution, generator)
                rows.append(torch.nn.functional.pad(rank, (0, length - size), value=torch.nan))
                errors[:size] += error
    return torch.cat(rows), errors


def _ranks(
    texts: list[tuple[int, ...]], distribution: PlainDistribution, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, m] numbers in (0, 1) for n texts of m tokens, and [m] the squared errors of their distribution, summed."""
    log_p, error = distribution.after([text[:-1] for text in texts])
    p, tokens = log_p.exp(), torch.tensor(texts, device=log_p.device)[:, :, None]
    mine = p.gather(2, tokens)
    likelier, equal = torch.where(p > mine, p, 0.0).sum(2).cpu(), torch.where(p == mine, p, 0.0).sum(2).cpu()
    inside = torch.rand(likelier.shape, generator=generator, dtype=torch.float64)
    return likelier + inside * equal, (error**2).sum(0).cpu()


def _test(
    kind: Literal["tokens", "ranks", "pairs"],
    scene: int | None,
    position: int,
    prefix: tuple[int, ...],
    draws: int,
    result: ChiSquare[int],
    level: float,
) -> DistributionTest:
    found = result._asdict()
    del found["statistic"]
    return DistributionTest(kind, scene, position, prefix, draws, level=level, **found)


class PlainDistribution:
    """The target's distribution after one prompt, given that each token is an ``allowed`` one ([V] bool; None: all)."""

    def __init__(
        self, target: PreTrainedModel, prompt: Prompt, temperature: float, allowed: torch.Tensor | None = None
    ):
        self._target, self._temperature = target, temperature
        self._barred = None if allowed is None else ~allowed.to(target.device)
        self.prompt = list(prompt)

    @torch.inference_mode()
    def after(self, texts: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            texts: n texts of m tokens each.

        Returns:
            [n, m + 1, V] float64, the log-probabilities of the next token after 0, 1, ..., m of their tokens, and
            [n, m + 1] the relative error of these probabilities (root mean square) if every logit is off by a unit in
            its last place, as those of another forward may be.
        """
        fed = torch.tensor(texts, device=self._target.device)
        if recurrent_layers(self._target):  # transformers does not repeat their states
            whole = torch.cat((torch.tensor(self.prompt, device=fed.device).expand(len(texts), -1), fed), 1).long()
            return self._log_p(self._target(whole, use_cache=False).logits[:, len(self.prompt) - 1 :])
        # One forward over the prompt, then one over all texts, which share its cache.
        cache = DynamicCache(config=self._target.config)
        prompt = torch.tensor([self.prompt], device=self._target.device)
        over = {cache_argument(self._target): cache, "use_cache": True}
        last = self._target(prompt, **over).logits[:, -1:]
        logits = last.expand(len(texts), -1, -1)
        if len(texts[0]):
            cache.batch_repeat_interleave(len(texts))
            logits = torch.cat((logits, self._target(fed, **over).logits), 1)
        return self._log_p(logits)

    def _log_p(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what ``after`` does, of these logits [n, m + 1, V]."""
        scaled = logits.double() / self._temperature
        if self._barred is not None:
            scaled = scaled.masked_fill(self._barred, -torch.inf)
        log_p = scaled.log_softmax(-1)
        unit = torch.finfo(self._target.dtype).eps * scaled.masked_fill(scaled.isinf(), 0.0)
        return log_p, (log_p.exp() * unit**2).sum(-1).sqrt()
