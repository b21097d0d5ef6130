"""Sampled texts of ``speculate()`` and of transformers' own ``generate(do_sample=True)``: two samples of one
distribution.

Compared by two-sample chi-square in two ways: whole texts of three new tokens, the frequent ones each by itself and the
rest together; and the rank of the second token among what the target finds likely after the first, where a filter that
is off by one shows. Each test raises a false alarm with probability 1e-6. The distribution under other settings is
enumerated from the target, so the power is known: every day, with 8,000 texts of the tiny pair from each, a
temperature of 1.2 instead of 1 is found with power 0.9999 (ranks), a top-k of 42 instead of 50 with 0.9999 (ranks).
Nightly, with 40,000 texts of the embedded pair from each: a temperature of 1.08 with 0.999 (texts), a top-k of 49 with
0.999 (ranks). ``test_power`` computes these figures, and ``test_a_bias_is_found`` plants such biases."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Iterable

import pytest
import torch
from scipy.stats import chi2, ncx2
from specdec import speculate
from support.models import tunable_pair

LEVEL, FEWEST = 1e-6, 20  # of an expected count, for a text to be counted by itself
LENGTH, TOP_K = 3, 50  # transformers' default
EVERYDAY, NIGHTLY, ROWS = 8_000, 40_000, 2_500
PROMPTS = {"tiny": [50, 20, 3], "embedded": [306, 850, 9, 272]}  # def read(self
Distribution = dict[tuple[int, ...], float]

nightly = pytest.mark.nightly
PAIRS = ["tiny", pytest.param("embedded", marks=nightly)]


def draws(name: str) -> int:
    return EVERYDAY if name == "tiny" else NIGHTLY


@pytest.fixture
def models(request):
    """(target, draft) of the pair that the test asks for."""

    def of(name: str):
        return tunable_pair(0.3) if name == "tiny" else request.getfixturevalue("pair")[:2]

    return of


def sample(target, name: str, count: int, **settings) -> list[tuple[int, ...]]:
    """``count`` texts of one prompt, many rows at a time."""
    texts: list[tuple[int, ...]] = []
    prompt = torch.tensor([PROMPTS[name]])
    shared = {"do_sample": True, "max_new_tokens": LENGTH, "eos_token_id": None, "pad_token_id": 0}
    while len(texts) < count:
        rows = min(ROWS, count - len(texts))
        out = target.generate(prompt, num_return_sequences=rows, **shared, **settings)
        texts += map(tuple, out[:, prompt.shape[1] :].tolist())
    return texts


@functools.cache
def theirs(target, name: str) -> list[tuple[int, ...]]:
    torch.manual_seed(1)
    return sample(target, name, draws(name))


@torch.no_grad()
def continued(target, name: str, texts: list[tuple[int, ...]], temperature: float, top_k: int) -> torch.Tensor:
    """[texts, V] probabilities of what comes next, by transformers' definition."""
    rows = []
    for start in range(0, len(texts), ROWS):
        ids = torch.tensor([[*PROMPTS[name], *text] for text in texts[start : start + ROWS]])
        logits = target(ids, logits_to_keep=1).logits[:, -1].double() / temperature
        rows.append(logits.masked_fill(logits < logits.topk(top_k)[0][:, -1:], -torch.inf).softmax(-1))
    return torch.cat(rows)


@functools.cache
def distribution(target, name: str, length: int, temperature: float = 1.0, top_k: int = TOP_K) -> Distribution:
    """Probabilities of all texts of ``length`` tokens, but for the rarest."""
    texts: Distribution = {(): 1.0}
    for _ in range(length):
        p = continued(target, name, list(texts), temperature, top_k)
        p *= torch.tensor(list(texts.values()))[:, None]
        where, before = (p > 1e-6).nonzero().tolist(), list(texts)
        values = p[p > 1e-6].tolist()
        texts = {(*before[row], token): value for (row, token), value in zip(where, values, strict=True)}
    return texts


def ranks(target, name: str) -> dict[tuple[int, int], int]:
    """(first token, second token) -> how many are likelier after the first."""
    first = [text for text in distribution(target, name, 1, top_k=TOP_K + 10)]
    order = continued(target, name, first, 1.0, TOP_K + 10).argsort(descending=True)[:, : TOP_K + 10].tolist()
    return {(*text, token): rank for text, row in zip(first, order, strict=True) for rank, token in enumerate(row)}


class Cells:
    """A statistic of a text, and its distribution under a distribution."""

    def __init__(self, target, name: str, which: str):
        self._target, self._name, self._which = target, name, which
        whole = distribution(target, name, LENGTH)
        self._frequent = {text for text, p in whole.items() if p * draws(name) >= FEWEST}
        self._ranks = ranks(target, name)

    def of(self, text: tuple[int, ...]) -> Hashable:
        if self._which == "texts":
            return text if text in self._frequent else "rest"
        return self._ranks.get(text[:2], "rest")

    def distribution(self, **settings) -> Counter:
        length = LENGTH if self._which == "texts" else 2
        cells: Counter = Counter()
        for text, p in distribution(self._target, self._name, length, **settings).items():
            cells[self.of(text)] += p
        cells["rest"] += 1 - sum(cells.values())
        return cells

    def count(self, texts: Iterable[tuple[int, ...]]) -> Counter:
        return Counter(self.of(text) for text in texts)


def p_value(ours: Counter, others: Counter) -> float:
    """Of two samples of equal size from one distribution."""
    assert ours.total() == others.total()
    cells = ours.keys() | others.keys()
    statistic = sum((ours[c] - others[c]) ** 2 / (ours[c] + others[c]) for c in cells)
    return chi2.sf(statistic, len(cells) - 1)


def power(cells: Cells, count: int, **settings) -> float:
    """With which probability samples of the distribution and of the one under ``settings`` are told apart."""
    p, q = cells.distribution(), cells.distribution(**settings)
    noncentrality = count * sum((p[c] - q[c]) ** 2 / (p[c] + q[c]) for c in p.keys() | q.keys() if p[c] + q[c] > 0)
    freedom = len(p.keys() | q.keys()) - 1
    return ncx2.sf(chi2.isf(LEVEL, freedom), freedom, noncentrality)


@pytest.mark.parametrize("rule", ("token", *(pytest.param(rule, marks=nightly) for rule in ("block", "coupled"))))
@pytest.mark.parametrize("name", PAIRS)
def test_texts_have_the_distribution_of_transformers(models, name, rule):
    target, draft = models(name)
    torch.manual_seed(2)
    speculator = speculate(draft, num_drafts=3, rule=rule)
    ours = sample(target, name, draws(name), custom_generate=speculator)
    for which in ("texts", "ranks"):
        cells = Cells(target, name, which)
        assert p_value(cells.count(ours), cells.count(theirs(target, name))) > LEVEL
    assert 0 < speculator.last_result.stats.alpha < 1


@pytest.mark.parametrize("name", PAIRS)
def test_power(models, name):
    target, count = models(name)[0], draws(name)
    texts, rank = (Cells(target, name, which) for which in ("texts", "ranks"))
    if name == "tiny":
        assert power(rank, count, temperature=1.2) > 0.9999
        assert power(rank, count, top_k=42) > 0.9999
    else:
        assert power(texts, count, temperature=1.08) > 0.999
        assert power(rank, count, top_k=49) > 0.999


@pytest.mark.parametrize(
    ("name", "which", "settings"),
    [
        ("tiny", "ranks", {"temperature": 1.2}),
        ("tiny", "ranks", {"top_k": 42}),
        ("embedded", "texts", {"temperature": 1.08}),
        ("embedded", "ranks", {"top_k": 49}),
    ],
)
@nightly
def test_a_bias_is_found(models, name, which, settings):
    target, draft = models(name)
    torch.manual_seed(3)
    ours = sample(target, name, draws(name), custom_generate=speculate(draft, num_drafts=3), **settings)
    cells = Cells(target, name, which)
    assert p_value(cells.count(ours), cells.count(theirs(target, name))) < LEVEL


@pytest.mark.parametrize("name", PAIRS)
def test_the_enumerated_distribution_is_that_of_transformers(models, name):
    """On which the figures of power stand: one sample against it."""
    target = models(name)[0]
    for which in ("texts", "ranks"):
        cells = Cells(target, name, which)
        expected, counts = cells.distribution(), cells.count(theirs(target, name))
        assert sum(expected.values()) == pytest.approx(1) and not counts.keys() - expected.keys()
        means = {cell: p * draws(name) for cell, p in expected.items() if p * draws(name) >= 1}
        statistic = sum((counts[cell] - mean) ** 2 / mean for cell, mean in means.items())
        assert chi2.sf(statistic, len(means) - 1) > LEVEL
