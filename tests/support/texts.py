"""Prompts; and comparisons of texts with the target's greedy text, or with the distribution of all texts of a toy
model."""

from __future__ import annotations

import functools
import itertools
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

from specdec_kernels import SamplingParams

from .models import TIE, generate


@functools.cache
def prompts_of(tokenizer, count: int) -> list[tuple[int, ...]]:
    """Beginnings somewhere in Python's standard library, of 1 to 48 tokens."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    generator = torch.Generator().manual_seed(0)
    found: dict[tuple[int, ...], None] = {}
    for i in itertools.count():
        lines = files[i % len(files)].read_text("utf-8", errors="ignore").splitlines(True)
        start = int(torch.randint(max(len(lines) - 12, 1), (), generator=generator))
        ids = tokenizer("".join(lines[start : start + 12])).input_ids
        length = int(torch.randint(1, 49, (), generator=generator))
        if len(ids) >= length:
            found[tuple(ids[:length])] = None
        if len(found) == count:
            return list(found)


def assert_same_greedy(model, prompt: list[int], got: list[int], expected: list[int]) -> None:
    """Asserts that texts are equal, or first differ at a near-tie, where the two tokens' logits are closer than TIE."""
    assert len(got) == len(expected)
    parted = next((i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b), None)
    if parted is not None:
        logits = model(torch.tensor([prompt + expected[:parted]])).logits[0, -1]
        gap = (logits.max() - logits[got[parted]]).item()
        assert gap < TIE, f"token {parted}: {got[parted]} instead of {expected[parted]}, {gap} below the largest logit"


def check_text_distribution(target, draft, count: int, prompt: Sequence[int] = (1, 2), **settings) -> None:
    """Checks texts of three tokens over a vocabulary of five. There are 125 such texts, so chi-square has 124 degrees
    of freedom and a 99.99 % quantile of 190. Of errors that change the probabilities of texts by 17 %, in the root of
    the mean square, 5,000 texts show 99 in 100; 30,000 do of errors of 7 %."""
    sampling = {"params": SamplingParams(1.3), "seed": list(range(count)), "max_new_tokens": 3}
    result = generate(target, draft, [[*prompt]] * count, 2, **sampling, **settings)
    assert 0.2 < result.stats.alpha < 0.95
    texts = list(itertools.product(range(5), repeat=3))
    with torch.inference_mode():
        logits = target(torch.tensor([[*prompt, *t] for t in texts])).logits[:, -4:-1] / 1.3
    chosen = logits.double().log_softmax(-1).gather(2, torch.tensor(texts)[..., None])
    expected = chosen.sum((1, 2)).exp() * count
    observed = torch.zeros(125, dtype=torch.float64)
    for a, b, c in result.tokens:
        observed[25 * a + 5 * b + c] += 1
    common = expected >= 5
    chi_square = ((observed - expected)[common] ** 2 / expected[common]).sum().item()
    assert chi_square < 190, chi_square
