"""Texts of the embedded pair in float32, greedy and by rule ``coupled``, are those of plain decoding, whatever the
drafter, K from 1 to 8, and batches from 1 to 64.

Nightly 1,000 prompts of 256 tokens for each drafter, half of them greedy; every day a slice. Batches of other shapes
round otherwise, so a text may part from the reference where two tokens are as good as equal: that is checked, and
counted."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from specdec import (
    EarlyExitDrafter,
    PromptLookupDrafter,
    SpeculativeDecoder,
    SuffixDrafter,
    SuffixMemory,
    UniversalDrafter,
)
from specdec.drafters import BatchState, Drafter, Drafts, DraftSession, Step
from specdec.evaluation.near_ties import Judge
from specdec.evaluation.verify.text_check import RaceNoise
from support.texts import prompts_of

from specdec_kernels import SamplingParams

DISTRIBUTIONS = (GREEDY, COUPLED) = ("greedy", "coupled")
TEMPERATURE = 0.8


class Hostile(Drafter, DraftSession):
    """Proposes what a broken drafter may: random tokens, ones out of range, none in the middle, too few columns."""

    def start(self, batch: BatchState) -> Hostile:
        return self

    def propose(self, step: Step) -> Drafts:
        generator = torch.Generator().manual_seed(step.index)
        width = int(torch.randint(step.num_drafts + 1, (), generator=generator))
        tokens = torch.randint(-50, 4200, (len(step.allowed), width), generator=generator)
        return Drafts(torch.where(tokens < -25, -1, tokens))


class AlmostRight(Drafter, DraftSession):
    """Knows the texts, and is wrong in every ninth token: accepted runs end everywhere."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]]):
        self.texts = texts

    def start(self, batch: BatchState) -> AlmostRight:
        self.rows = [[] for _ in range(batch.size)]
        return self

    def begin(self, prompts: dict[int, list[int]]) -> None:
        for row, prompt in prompts.items():
            self.rows[row] = [*prompt, *self.texts[tuple(prompt)]]

    def propose(self, step: Step) -> Drafts:
        drafts = []
        for row, text in zip(self.rows, step.texts, strict=True):
            ahead = [*row, *[0] * step.num_drafts][len(text) : len(text) + step.num_drafts]
            drafts.append([(t + 1) % 4096 if (len(text) + i) % 9 == 0 else t for i, t in enumerate(ahead)])
        return Drafts(torch.tensor(drafts))


DRAFTERS = ("model", "confidence", "lookup", "suffix", "memory", "early_exit", "universal", "hostile", "almost_right")


def drafter_of(name: str, pair, texts):
    target, draft, tokenizer = pair
    return {
        "model": lambda: draft,
        "confidence": lambda: draft,
        "lookup": PromptLookupDrafter,
        "suffix": SuffixDrafter,
        "memory": lambda: SuffixDrafter(memory=SuffixMemory()),
        "early_exit": lambda: EarlyExitDrafter(target, 3),
        "universal": lambda: UniversalDrafter(draft, tokenizer, tokenizer),
        "hostile": Hostile,
        "almost_right": lambda: AlmostRight(texts),
    }[name]()


class Batch(NamedTuple):
    """Prompts that are decoded together."""

    first: int  # the number of the first prompt; a prompt's number is its seed
    size: int
    num_drafts: int
    distribution: str

    def prompts(self, tokenizer) -> dict[int, tuple[int, ...]]:
        """Number -> prompt."""
        return dict(enumerate(prompts_of(tokenizer, self.first + self.size)[self.first :], self.first))


def in_turn(first: int, sizes: tuple[int, ...], more: Callable[[int], tuple[int, str]]) -> tuple[Batch, ...]:
    starts = itertools.accumulate(sizes[:-1], initial=first)
    return tuple(Batch(start, size, *more(turn)) for turn, (start, size) in enumerate(zip(starts, sizes, strict=True)))


def twelve_prompts(distribution: str) -> tuple[Batch, ...]:
    return in_turn(0, (1, 4, 7), lambda turn: (3 * turn % 8 + 1, distribution))


def hundred_prompts(number: int) -> tuple[Batch, ...]:
    """Prompts 100 number to 100 number + 99. In ten hundreds, a batch of each size has every K and both
    distributions."""
    return in_turn(
        100 * number,
        (1, 64, 2, 7, 16, 3, 7),
        lambda turn: ((3 * turn + 5 * number) % 8 + 1, DISTRIBUTIONS[(turn + number // 2) % 2]),
    )


def decode(decoder: SpeculativeDecoder, prompts: dict[int, tuple[int, ...]], new_tokens: int, distribution: str):
    sampled = {"params": SamplingParams(TEMPERATURE), "rule": "coupled", "seed": list(prompts)}
    more = sampled if distribution == COUPLED else {}
    return decoder.generate([*map(list, prompts.values())], max_new_tokens=new_tokens, eos_token_id=[], **more)


@functools.cache
def plain_texts(pair, batches: tuple[Batch, ...], new_tokens: int) -> dict[tuple[int, ...], list[int]]:
    """Of each prompt of the batches; all that have one distribution are decoded together."""
    target, _, tokenizer = pair
    decoder, texts = SpeculativeDecoder(target, None, 0), {}
    for distribution in {batch.distribution for batch in batches}:
        prompts: dict[int, tuple[int, ...]] = {}
        for batch in batches:
            prompts |= batch.prompts(tokenizer) if batch.distribution == distribution else {}
        result = decode(decoder, prompts, new_tokens, distribution)
        texts |= zip(prompts.values(), result.tokens, strict=True)
    return texts


def check(name: str, pair, batches: tuple[Batch, ...], new_tokens: int) -> int:
    """Compares the texts. Returns how many part at a near-tie."""
    target, _, tokenizer = pair
    texts = plain_texts(pair, batches, new_tokens)
    drafter, parted = drafter_of(name, pair, texts), 0
    judges = {GREEDY: Judge(target), COUPLED: Judge(target, temperature=TEMPERATURE)}
    for batch in batches:
        prompts = batch.prompts(tokenizer)
        more = {"confidence": 0.4} if name == "confidence" else {}
        decoder = SpeculativeDecoder(target, drafter, batch.num_drafts, **more)
        result = decode(decoder, prompts, new_tokens, batch.distribution)
        assert result.drafter_error is None
        for (seed, prompt), tokens in zip(prompts.items(), result.tokens, strict=True):
            noise = RaceNoise(seed, target.config.vocab_size) if batch.distribution == COUPLED else None
            parting = judges[batch.distribution].explain(prompt, texts[prompt], tokens, noise=noise)
            assert parting is None or parting.verdict == "near-tie", (name, batch, parting)
            parted += parting is not None
    return parted


# tests/drafters has texts of the others.
SLICES = [("hostile", GREEDY), ("model", COUPLED), ("memory", COUPLED)]


@pytest.mark.parametrize(("name", "distribution"), SLICES)
def test_a_slice(name, pair, distribution):
    assert check(name, pair, twelve_prompts(distribution), 10) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("number", range(10))
def test_a_thousand_prompts(name, pair, number, record_property):
    parted = check(name, pair, hundred_prompts(number), 256)
    record_property("texts that part at a near-tie", parted)
    assert parted <= 5


def test_the_thousand_prompts_are_decoded_in_every_way():
    batches = [batch for number in range(10) for batch in hundred_prompts(number)]
    assert [i for b in batches for i in range(b.first, b.first + b.size)] == list(range(1000))
    for size in {batch.size for batch in batches}:
        same = [batch for batch in batches if batch.size == size]
        assert {batch.num_drafts for batch in same} == {*range(1, 9)}
        assert {batch.distribution for batch in same} == {*DISTRIBUTIONS}
