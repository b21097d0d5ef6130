"""Greedy texts of the embedded pair in float32 are those of plain decoding with chains and with trees of every drafter,
the embedded heads among them: alone, in batches of 8, and in a scheduler, where sequences begin beside others.

Nightly 200 prompts of 128 tokens for each; every day a slice of what ``test_equality.py`` does not have. A text may
part from the reference where two tokens are as good as equal: that is checked, and counted."""

from __future__ import annotations

import functools

import pytest
from specdec import (
    EarlyExitDrafter,
    PromptLookupDrafter,
    Request,
    Scheduler,
    SpeculativeDecoder,
    SuffixDrafter,
    UniversalDrafter,
    load_embedded_head,
)
from specdec.drafters.heads.load import KINDS
from specdec.evaluation.near_ties import Judge
from support.texts import prompts_of

DRAFTERS = ("model", "early-exit", "lookup", "suffix", "universal", *KINDS)
TREES = tuple(name for name in DRAFTERS if name != "universal")  # those that propose trees
CELLS = [*((name, False) for name in DRAFTERS), *((name, True) for name in TREES)]
IDS = [f"{name}-{'tree' if tree else 'chain'}" for name, tree in CELLS]
ROWS = 8


@functools.cache
def drafter_of(name: str, pair):
    target, draft, tokenizer = pair
    return {
        "model": lambda: draft,
        "early-exit": lambda: EarlyExitDrafter(target, 3),
        "lookup": lambda: PromptLookupDrafter(min_ngram=1),
        "suffix": SuffixDrafter,
        "universal": lambda: UniversalDrafter(draft, tokenizer, tokenizer),
        **{kind: functools.partial(load_embedded_head, kind, target) for kind in KINDS},
    }[name]()


@functools.cache
def plain_texts(pair, count: int, new_tokens: int) -> list[list[int]]:
    decoder, prompts = SpeculativeDecoder(pair[0], None, 0), [*map(list, prompts_of(pair[2], count))]
    found: list[list[int]] = []
    for first in range(0, count, 50):
        batch = prompts[first : first + 50]
        found += decoder.generate(batch, max_new_tokens=new_tokens, eos_token_id=[]).tokens
    return found


def check(name: str, tree: bool, pair, count: int, new_tokens: int) -> int:
    """Decodes the first tenth of the prompts one by one, the next four tenths in batches of 8, and the others in a
    scheduler, with texts of many lengths. Returns how many part at a near-tie."""
    target, _, tokenizer = pair
    prompts, expected = [*map(list, prompts_of(tokenizer, count))], plain_texts(pair, count, new_tokens)

    def decoder(num_drafts: int, nodes: int) -> SpeculativeDecoder:
        return SpeculativeDecoder(target, drafter_of(name, pair), num_drafts, tree=nodes if tree else None)

    alone, half = max(count // 10, 1), max(count // 2, 2)
    ends = [(i, i + 1) for i in range(alone)]
    ends += [(first, min(first + ROWS, half)) for first in range(alone, half, ROWS)]
    found: dict[int, list[int]] = {}
    accepted = 0
    one, many = decoder(3, 6), decoder(6, 16)
    for first, end in ends:
        of = one if end - first == 1 else many
        result = of.generate(prompts[first:end], max_new_tokens=new_tokens, eos_token_id=[])
        assert result.drafter_error is None
        found |= zip(range(first, end), result.tokens, strict=True)
        accepted += result.stats.accepted
    served = decoder(4, 12)
    # Sampled children are verified by other rules as well, under which greedy texts are the same.
    rule = "token" if tree and getattr(served.drafter, "samples_trees", False) else None
    lengths = {i: new_tokens - (i * 37) % (new_tokens // 2) for i in range(half, count)}
    scheduler = Scheduler(served, rows=min(ROWS, count - half - 1), max_length=48 + new_tokens, rule=rule)
    for outcome in scheduler.run(Request(prompts[i], n, eos_token_id=[], id=i) for i, n in lengths.items()):
        found[outcome.request.id] = outcome.tokens
        accepted += outcome.stats.accepted
    assert scheduler.drafter_error is None and accepted > 0
    judge, parted = Judge(target), 0
    for i, prompt in enumerate(prompts):
        same = expected[i][: lengths.get(i, new_tokens)]
        parting = judge.explain(prompt, same, found[i])
        assert parting is None or parting.verdict == "near-tie", (name, tree, i, parting)
        parted += parting is not None
    return parted


@pytest.mark.parametrize(("name", "tree"), [("dflash", False), ("model", True), ("suffix", True)])
def test_a_slice(name, tree, pair):
    assert check(name, tree, pair, 7, 12) == 0


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "tree"), CELLS, ids=IDS)
def test_two_hundred_prompts(name, tree, pair, record_property):
    parted = check(name, tree, pair, 200, 128)
    record_property("texts that part at a near-tie", parted)
    assert parted <= 5


@pytest.mark.parametrize("name", DRAFTERS)
def test_all_that_propose_trees_are_tested(name, pair):
    drafter = SpeculativeDecoder(pair[0], drafter_of(name, pair), 1).drafter
    assert getattr(drafter, "trees", False) == (name in TREES)
