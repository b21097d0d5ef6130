"""Chi-square tests of the emitted distribution: rule x form of q x filter or table x temperature x dtype x K x batch
row.

The everyday run has 50,000 draws per cell, fixed seeds, and of the cells in float32 those of every rule with every
form of q. ``-m nightly`` runs all of these with 10 million draws, and with 50,000 the cells in bfloat16 and float16,
which differ only in how logits are read. A draw with its drafts takes about 2 microseconds on one core: ten seconds
for the everyday run and an hour for the nightly one.

All tests of this file, test_texts.py and test_randomness.py together raise a false alarm with probability <= 1e-6
(Bonferroni).

With power 0.999, a cell with V = 5 finds that probabilities are wrong by a factor of 1 +- 0.055 for (first, second
token), 1 +- 0.052 for (number accepted, last token) and 1 +- 0.045 for the number accepted. With V = 64 it finds
1 +- 0.117 or less. With 10 million draws, the figures are 0.0040, 0.0037, 0.0033 and 0.0101. ``test_power`` computes
them, and the tests named ``..._is_found`` show that bugs of real systems are found.

The reference is slow, so it draws less often. Triton's interpreter is slower still. Its evidence is
``test_triton_draws_what_the_reference_draws`` (with tests/kernels/test_parity.py), since with the same seeds its tokens
must equal the reference's, and the chi-square of the other backends. On a GPU, Triton runs all cells, as ``cpu``
does."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from specdec.evaluation.verify.chi_square import chi_square, detectable_bias
from support.cells import (
    BATCHES,
    BIG_BACKENDS,
    DRAWS,
    DTYPES,
    FAMILY,
    LEVEL,
    NARROW,
    NIGHTLY,
    REFERENCE_BATCHES,
    ROWS,
    SETTINGS,
    STATISTICS,
    TEMPERATURES,
    TESTS,
    WIDE,
    Batch,
    Q,
    check,
    narrow_batch,
    steps,
)

from specdec_kernels.backends import reference
from specdec_kernels.ops import RULES

DAILY = DRAWS // 2
LARGE, LARGE_DRAWS = 1100, 5_000  # two blocks of the race, the last one partial
LARGE_KINDS = dict(zip(RULES, ("opposite", "near_equal", "opposite"), strict=True))


SINGLE = tuple(b for b in BATCHES if b.dtype == torch.float32)
# Every rule with every form of q: p and q are close for one rule where they are opposite for the next.
EVERY_DAY = tuple(
    b for b in SINGLE
    if b.vocabulary == WIDE or b.q in ("full", "one_hot")
    or b.kind == ("opposite", "near_equal")[(RULES.index(b.rule) + Q.index(b.q)) % 2]
)  # fmt: skip


@pytest.mark.parametrize(
    "batch", [b if b in EVERY_DAY else pytest.param(b, marks=pytest.mark.nightly) for b in BATCHES], ids=str
)
@pytest.mark.parametrize("backend", BIG_BACKENDS)
def test_emitted_distribution(batch, backend):
    check(batch, backend, DAILY)


@pytest.mark.nightly
@pytest.mark.parametrize("batch", SINGLE, ids=str)
@pytest.mark.parametrize("backend", BIG_BACKENDS)
def test_ten_million_draws(batch, backend):
    check(batch, backend, NIGHTLY)


@pytest.mark.parametrize("draws", [DRAWS // 20, pytest.param(DRAWS, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("batch", REFERENCE_BATCHES, ids=str)
def test_emitted_distribution_of_the_reference(batch, draws):
    check(batch, "reference", draws)


@pytest.mark.parametrize("vocabulary", [1, 2, 5, 64, 1023])
def test_padding_to_a_block_draws_the_same(vocabulary):
    """Weights of 0 that fill a block of the race change neither the token nor its margin, nor whether there is one."""
    generator = torch.Generator().manual_seed(vocabulary)
    weights = torch.rand(200, vocabulary, dtype=torch.float64, generator=generator)
    weights[weights < 0.3] = 0.0
    seed, position = torch.randint(-(2**63), 2**63 - 1, (2, 200), generator=generator)
    padded = torch.nn.functional.pad(weights, (0, reference.BLOCK - vocabulary))
    streams = (reference.RECOVER_BLOCK, reference.RECOVER_TOKEN)
    drawn = [reference.race(w, seed, position.abs(), 2, streams) for w in (weights, padded)]
    assert all(map(torch.equal, *drawn)) and drawn[0][0].unique().numel() > min(vocabulary, 20) / 2


def test_distribution_of_the_two_level_race(monkeypatch):
    """Five tokens in blocks of two have the same distribution, drawn by other random numbers."""
    monkeypatch.setattr(reference, "BLOCK", 2)
    check(narrow_batch("token", "stats", "opposite", "filters"), "reference", DRAWS // 10)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", BIG_BACKENDS)
def test_distribution_of_many_blocks(rule, backend):
    """V = 1100: the distributions of the number accepted, of the first token's hundred and of its remainder. With one
    draft, ``token`` and ``block`` accept with probability sum min(p, q), ``coupled`` with that of two shared races."""
    batch = Batch(rule, "stats", LARGE_KINDS[rule], torch.float32, "tables", LARGE, 0)
    parts = [(out.tokens[:, 0], out.num_accepted) for out in steps(batch, backend, LARGE_DRAWS)]
    first, accepted = (torch.cat(column).view(-1, ROWS) for column in zip(*parts, strict=True))
    for row, cell in enumerate(batch.cells()):
        p, q = (model(()) for model in batch.models(row))
        alpha = np.minimum(p, q).sum()
        if rule == "coupled":
            both = ((p > 0) & (q > 0)).nonzero()[0]
            alpha = sum(1 / np.maximum(p / p[v], q / q[v]).sum() for v in both)
        for counted, distribution in (
            (accepted[:, row], [1 - alpha, alpha] if cell.num_drafts else [1.0]),
            (first[:, row] // 100, p.reshape(-1, 100).sum(1)),
            (first[:, row] % 100, p.reshape(-1, 100).sum(0)),
        ):
            result = chi_square(Counter(counted.tolist()), dict(enumerate(map(float, distribution))), LEVEL)
            assert result.p_value > LEVEL, (cell.name, result)


EXAMPLES = [b for b in BATCHES if b.vocabulary == NARROW][::13]


@pytest.mark.parametrize(
    ("batch", "draws"),
    [
        pytest.param(batch, draws, marks=pytest.mark.nightly if draws > 1 or i % 2 else [], id=f"{batch}-{draws}")
        for (i, batch), draws in itertools.product(enumerate(EXAMPLES), (1, 25))
    ],
)
def test_triton_draws_what_the_reference_draws(batch, draws):
    """Only near-ties may differ, fewer than one in a thousand; with these seeds none does."""
    (ours,), (theirs,) = (steps(batch, backend, draws) for backend in ("triton", "reference"))
    assert torch.equal(ours.tokens, theirs.tokens)


# ---- What these tests can see ------------------------------------------------------------------------------


def test_power():
    """Checks the figures in this file's docstring, and that no cell is weaker."""
    narrow = (NARROW * (NARROW + 1), 4 * NARROW, 4)  # outcomes of each statistic, at most
    for draws, biases, wide in ((DAILY, (0.055, 0.052, 0.045), 0.117), (NIGHTLY, (0.0040, 0.0037, 0.0033), 0.0101)):
        for outcomes, bias in zip(narrow, biases, strict=True):
            assert bias / 1.1 < detectable_bias(draws, outcomes - 1, LEVEL) < bias
        # Outcomes that are expected fewer than 25 times count as one.
        outcomes = min(WIDE * (WIDE + 1), draws // 25)
        assert detectable_bias(draws, outcomes - 1, LEVEL) < wide


def test_cells():
    """There are 432 different cells, over all rules, forms of q, settings, temperatures, dtypes, K and batch
    rows."""
    cells = {
        (batch.rule, batch.q, batch.kind, batch.dtype, batch.vocabulary, row, cell)
        for batch in BATCHES
        for row, cell in enumerate(batch.cells())
    }
    assert len(cells) == len(BATCHES) * ROWS == 432
    for rule in RULES:
        batches = [b for b in BATCHES if b.rule == rule and b.vocabulary == NARROW]
        assert {c.num_drafts for b in batches for c in b.cells()} == {0, 1, 2, 3}
        settings = {(c.context.setting, b.settings, row) for b in batches for row, c in enumerate(b.cells())}
        assert len(settings) == len(SETTINGS) * ROWS * len(TEMPERATURES)
        assert {(b.settings, b.dtype) for b in batches} == set(itertools.product(SETTINGS, DTYPES))


def test_every_day_has_every_rule_with_every_form_of_q_and_pair():
    def of(batches, *names):
        return {tuple(getattr(b, name) for name in names) for b in batches}

    for names in (("rule", "q"), ("rule", "kind"), ("q", "kind"), ("rule", "settings"), ("rule", "vocabulary")):
        assert of(EVERY_DAY, *names) == of(SINGLE, *names), names


def test_family():
    """LEVEL is small enough for everyday and nightly tests together."""
    backends = 2  # at most: cpu and a GPU
    of_cells = len(STATISTICS) * ROWS * (backends * len(BATCHES + SINGLE) + 2 * len(REFERENCE_BATCHES) + 1)
    of_many_blocks = 3 * ROWS * len(RULES) * backends
    # test_texts.py and test_randomness.py have fewer than 500, test_trees_chi_square.py fewer than 1500
    assert of_cells + of_many_blocks + 500 + 1500 <= TESTS
    assert LEVEL * TESTS <= FAMILY
