"""Chi-square of whole texts, decoded step by step as the loop does, on a toy language model with a known distribution.

A text of eight tokens (V = 3) takes several steps. Noise that is used in two of them biases the text although every
single step has the right distribution, so only these tests can see it. With power 0.999, a test of four neighbouring
tokens (81 outcomes) finds that probabilities are wrong by a factor of 1 +- 0.065, and a test of the whole text 1 +-
0.125. With 10 million draws, these figures are 0.0046 and 0.011."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from specdec.evaluation.verify.chi_square import ChiSquare, chi_square, detectable_bias
from support.cells import BIG_BACKENDS, LEVEL, NIGHTLY, marginal
from support.exact import Setting, params_of

from specdec_kernels import draft_step, speculative_step
from specdec_kernels.backends import reference
from specdec_kernels.ops import RULES
from specdec_kernels.testing import Distribution, bits_of, device_of, text_distribution
from specdec_kernels.types import TokenTable

LENGTH, TOY, MOST = 8, 3, 3  # tokens of a text; vocabulary; drafts of a step, at most
DRAWS = 50_000
TARGET = torch.tensor([[0.0, 1.2, -0.4], [0.9, -0.7, 0.3], [-0.5, 0.2, 1.0], [0.4, 0.0, -0.3]])  # by the last token
DRAFT = torch.tensor([[0.8, -0.3, 0.2], [-0.6, 0.9, 0.0], [0.7, 0.1, -0.9], [-0.4, 0.6, 0.1]])
# The tokens that may follow each last token, and how many drafts of a step are drawn among them.
ALLOWED, MASKED = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1], [0, 1, 1]], dtype=torch.bool), 1
SETTINGS = {
    "plain": Setting(),
    "penalties": Setting(0.9, top_p=0.95, repetition_penalty=1.2, presence_penalty=-0.2, frequency_penalty=0.15),
}
# The statistics of texts that are tested: windows of neighbouring tokens, and the whole text.
STATISTICS = {str(key): key for key in (slice(4), slice(2, 6), slice(4, 8), slice(8))}


class Decoding(NamedTuple):
    """How texts are decoded. ``num_drafts`` None: one draft after a rejection, else one more than before, up to
    MOST."""

    rule: str
    num_drafts: int | None
    setting: str = "plain"
    masked: bool = False

    def __str__(self) -> str:
        return f"{self.rule}-K{self.num_drafts or 'adaptive'}-{self.setting}{'-masked' * self.masked}"


DECODINGS = (
    *(Decoding(rule, num_drafts) for rule in RULES for num_drafts in (1, MOST, None)),
    *(Decoding(rule, None, "penalties", masked) for rule in RULES for masked in (False, True)),
)


def decode(decoding: Decoding, backend: str, seed: torch.Tensor, forget_position: bool = False) -> torch.Tensor:
    """Texts [n, LENGTH] for seeds [n]. Positions advance by the number of emitted tokens."""
    device, setting = device_of(backend), SETTINGS[decoding.setting]
    target, draft, words, seed = (t.to(device) for t in (TARGET, DRAFT, bits_of(ALLOWED), seed))
    text = torch.full((len(seed), LENGTH + MOST + 1), -1, device=device)
    length = torch.zeros_like(seed)
    num_drafts = torch.full_like(seed, decoding.num_drafts or 1)
    while (active := (length < LENGTH).nonzero()[:, 0]).numel():
        last = text[active, length[active] - 1]  # at first this reads the empty column -1, and so TARGET[-1]
        common = {
            "params": params_of([setting]),
            "seed": seed[active],
            "position": length[active] * (not forget_position),
            "rule": decoding.rule,
            "table": table_of(text[active]) if setting.needs_table() else None,
            "backend": backend,
        }
        drafts = torch.empty((len(active), 0), dtype=torch.int64, device=device)
        for i in range(int(num_drafts[active].max())):
            before = drafts[:, -1] if i else last
            mask = words[before] if decoding.masked and i < MASKED else None
            drawn = draft_step(draft[before], offset=i, drafts=drafts, allowed=mask, **common)
            drafts = torch.cat([drafts, drawn.tokens[:, None]], 1)
        context = torch.cat([last[:, None], drafts], 1)
        q = None if decoding.rule == "coupled" else draft[context[:, :-1]]
        masks = {"allowed": words[context], "masked_drafts": 0 if q is None else MASKED} if decoding.masked else {}
        out = speculative_step(target[context], drafts, q, num_drafts=num_drafts[active], **masks, **common)
        kept = out.tokens >= 0
        slots = length[active, None] + torch.arange(out.tokens.shape[1], device=device)
        text[active[:, None].expand_as(slots)[kept], slots[kept]] = out.tokens[kept]
        length[active] += out.num_emitted
        if decoding.num_drafts is None:
            full = out.num_accepted == num_drafts[active]
            num_drafts[active] = torch.where(full, num_drafts[active] + 1, 1).clamp(max=MOST)
    return text[:, :LENGTH].cpu()


def table_of(text: torch.Tensor) -> TokenTable:
    count = torch.stack([(text == v).sum(1) for v in range(TOY)], 1)
    nothing = torch.zeros_like(count)
    return TokenTable(nothing + torch.arange(TOY, device=text.device), nothing.float(), nothing.bool(), count.int())


@functools.cache
def distribution_of(setting: str, masked: bool) -> Distribution:
    logits = TARGET.masked_fill(~ALLOWED, -torch.inf) if masked else TARGET

    def target(text: tuple[int, ...]):
        return SETTINGS[setting].probabilities(logits[text[-1] if text else -1].tolist(), text)

    return text_distribution(target, LENGTH)


def counted(decoding: Decoding, backend: str, draws: int, **more) -> dict:
    counts, powers = torch.zeros(TOY**LENGTH, dtype=torch.int64), [TOY**i for i in range(LENGTH)]
    for seed in torch.arange(draws).split(8192 if backend == "reference" else 50_000):
        code = decode(decoding, backend, seed, **more) @ torch.tensor(powers)
        counts += code.bincount(minlength=len(counts))
    return {tuple(c // p % TOY for p in powers): n for c, n in enumerate(counts.tolist()) if n}


def results(decoding: Decoding, backend: str, draws: int, **more) -> Iterator[tuple[str, ChiSquare]]:
    counts, distribution = counted(decoding, backend, draws, **more), distribution_of(decoding.setting, decoding.masked)
    for name, window in STATISTICS.items():
        yield name, chi_square(*(marginal(m, lambda text, w=window: text[w]) for m in (counts, distribution)), LEVEL)


def check(*arguments) -> None:
    for name, result in results(*arguments):
        assert result.p_value > LEVEL, (name, result)


def every_day_or_nightly() -> Iterator:
    """Every day with a K that follows acceptance, and penalties, which has what a fixed K and no penalties have, with
    and without masks. With a fixed K that of ``block``, the rule whose noise may not be used again."""
    for decoding, draws in itertools.product(DECODINGS, (DRAWS, NIGHTLY)):
        every_day = decoding == Decoding("block", MOST) or decoding.setting == "penalties"
        yield pytest.param(
            decoding, draws, marks=[] if every_day and draws == DRAWS else pytest.mark.nightly, id=f"{decoding}-{draws}"
        )


@pytest.mark.parametrize(("decoding", "draws"), every_day_or_nightly())
@pytest.mark.parametrize("backend", BIG_BACKENDS)
def test_whole_texts(backend, decoding, draws):
    check(decoding, backend, draws)


def test_whole_texts_of_the_reference():
    check(Decoding("block", None), "reference", DRAWS // 5)


def found(*arguments, **more) -> bool:
    return min(result.p_value for _, result in results(*arguments, **more)) < 1e-30


@pytest.mark.parametrize("rule", ["token", "block"])
def test_noise_reused_between_steps_is_found(rule):
    """A loop that forgets to advance positions: every step draws the same numbers."""
    assert found(Decoding(rule, MOST), "cpu", DRAWS // 5, forget_position=True)


def test_noise_by_absolute_position_is_found_in_block(monkeypatch):
    """Counters of (position + offset, 0) are right for ``token``. But ``block`` uses the noise of positions that it
    then does not decide, and would use it again in the next step."""
    philox = reference.philox

    def by_position(seed, index, position, offset, stream):
        return philox(seed, index, position + offset, 0, stream)

    monkeypatch.setattr(reference, "philox", by_position)
    check(Decoding("token", MOST), "reference", DRAWS // 5)
    assert found(Decoding("block", MOST), "reference", DRAWS // 2)


def test_power():
    """Checks the figures in this file's docstring. Texts that are expected fewer than 25 times count as one outcome."""
    for draws, four, whole in ((DRAWS, 0.065, 0.125), (NIGHTLY, 0.0046, 0.011)):
        assert four / 1.1 < detectable_bias(draws, TOY**4 - 1, LEVEL) < four
        assert detectable_bias(draws, min(TOY**LENGTH, draws // 25) - 1, LEVEL) < whole
