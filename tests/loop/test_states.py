"""Every state of a batch: all combinations of its settings exist, do what they say, and give the text of plain
decoding, in a batch that is fed while it runs. A recording stands in for CUDA graphs, as in test_graphs.py."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from specdec import AdaptiveDrafts, Request, SequenceState, SpeculativeDecoder
from specdec.drafters import guard
from specdec.loop.batch import Batch
from specdec.loop.graphs import StepGraphs
from specdec.loop.step import StepRunner
from support.models import prompts, tunable_pair
from support.recorded import record
from support.table_trees import BUSHY, TableTrees, bigrams, forgetful

from specdec_kernels import SamplingParams, validation

ROWS = 3
CHAIN, TREE, PLAIN = "chain", "tree", "without a drafter"
NUM_DRAFTS = {"fixed": 3, "adaptive": AdaptiveDrafts(3, costs=[1.0, 1.01, 1.02, 1.03])}


@pytest.fixture(autouse=True)
def _values_are_not_read(monkeypatch):
    """Nor are they where a step is a graph."""
    monkeypatch.setattr(validation, "check_counts", lambda *values: None)
    monkeypatch.setattr(validation, "check_parents", lambda parents, batch, nodes, device: parents.expand(batch, -1))
    monkeypatch.setattr(guard, "_out_of_order", lambda parents: False)


@functools.cache
def requests() -> list[Request]:
    """More than there are rows, greedy and sampled."""
    return [
        Request(prompt, new, SamplingParams(temperature), seed=i, eos_token_id=[])
        for i, (prompt, new, temperature) in enumerate(
            zip(prompts(5, 1, 12), (10, 3, 7, 5, 8), (0.0, 0.8, 1.1, 0.0, 0.6), strict=True)
        )
    ]


@functools.cache
def plain_texts() -> list[list[int]]:
    decoder, texts = SpeculativeDecoder(forgetful(), None, 0), []
    for r in requests():
        sampled = {"params": r.params, "seed": r.seed, "rule": "coupled", "eos_token_id": []}
        texts += decoder.generate([list(r.prompt)], max_new_tokens=r.max_new_tokens, **sampled).tokens
    return texts


def drained(batch: Batch, decoder: SpeculativeDecoder) -> tuple[list[SequenceState], bool]:
    """The sequences of all requests, each of which begins in the first row that is free; and whether the host ever read
    a step later than it ended."""
    waiting = [SequenceState.of(i, r, decoder.target, decoder.most_drafts) for i, r in enumerate(requests())]
    sequences, late = list(waiting), False
    while waiting or batch.live:
        free = [row for row, sequence in enumerate(batch.sequences) if sequence is None]
        batch.add({row: waiting.pop(0) for row in free[: len(waiting)]})
        while batch.prefilling:
            batch.read_part()
        before = sum(len(s.tokens) for s in sequences)
        outputs = batch.step()
        late |= bool(batch.live) and not outputs and before == sum(len(s.tokens) for s in sequences)
    return sequences, late


@pytest.mark.parametrize(
    ("drafts", "k"),
    [*itertools.product((CHAIN, TREE), NUM_DRAFTS), (PLAIN, "fixed")],  # without a drafter K is 0
)
@torch.inference_mode()
def test_every_state_has_the_text_of_plain_decoding(drafts, k):
    target = forgetful()
    drafter = None if drafts == PLAIN else TableTrees(bigrams(target), BUSHY)
    num_drafts = 0 if drafts == PLAIN else NUM_DRAFTS[k]
    decoder = SpeculativeDecoder(target, drafter, num_drafts, tree=len(BUSHY) if drafts == TREE else None)
    for logits, async_scheduling, graphs in itertools.product((False, True), repeat=3):
        given = {"logits": logits, "async_scheduling": async_scheduling}
        config = decoder.batch_config(ROWS, 64, decoder.read_rule("coupled"), max_eos=1)
        recorded = StepGraphs(capture=record, allocated=lambda: 0) if graphs else None
        batch = Batch(dataclasses.replace(config, graphs=recorded, **given))
        sequences, late = drained(batch, decoder)
        state = (logits, async_scheduling, graphs)
        assert [s.tokens for s in sequences] == plain_texts(), state
        assert drafter is None or (batch.session.error is None and sum(s.stats.accepted for s in sequences) > 5), state
        assert [len(s.logits) for s in sequences] == [len(s.tokens) * logits for s in sequences], state
        assert late == (async_scheduling and not logits), state
        assert recorded is None or (recorded.replays > 3) == (not logits), state


class EndsByRow:
    """Stopping criteria: a sequence ends after so many tokens."""

    def __init__(self, lengths: list[int]):
        self.lengths, self.emitted = lengths, [0] * len(lengths)

    def first_end(self, sequence: int, text: list[int], new: int) -> int | None:
        before, self.emitted[sequence] = self.emitted[sequence], self.emitted[sequence] + new
        left = self.lengths[sequence] - before
        return left if left <= new else None


@pytest.mark.parametrize("k", NUM_DRAFTS)
def test_rows_whose_texts_ended_are_dropped(k, monkeypatch):
    """Where K adapts, a step costs what its load does. Where K is fixed, a step keeps its shape, on which the rounding
    of its logits depends: a seed's text is then the same whatever its neighbours."""
    target, draft = tunable_pair(0.3)
    ragged, lengths, rows = prompts(8, 2, 9), [60, 40, 6, 5, 4, 3, 2, 1], []
    given = {"max_new_tokens": 60, "eos_token_id": [], "rule": "coupled"}
    given |= {"params": SamplingParams(0.8), "seed": list(range(8))}
    plain = SpeculativeDecoder(target, None, 0).generate(ragged, **given)
    decoder, forward = SpeculativeDecoder(target, draft, NUM_DRAFTS[k]), StepRunner.target_forward
    monkeypatch.setattr(StepRunner, "target_forward", lambda *args: rows.append(len(args[1].live)) or forward(*args))
    result = decoder.generate(ragged, stop=EndsByRow(lengths), **given)
    assert result.tokens == [text[:length] for text, length in zip(plain.tokens, lengths, strict=True)]
    assert len(rows) == result.stats.target_forwards and rows == sorted(rows, reverse=True)
    assert set(rows) == ({8} if k == "fixed" else {8, 2, 1}), rows
