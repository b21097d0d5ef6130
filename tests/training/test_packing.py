"""Blocks of tokens: all of them, each once in an epoch, in an order of the seed."""

from __future__ import annotations

import pytest
import torch
from specdec.training.lessons import Packed

DOCUMENTS = [list(range(100, 117)), list(range(200, 230)), [7]]


def test_blocks_are_the_documents_one_after_the_other():
    packed = Packed(DOCUMENTS, length=5, size=2, seed=0)
    assert packed.blocks.flatten().tolist() == [t for d in DOCUMENTS for t in d][:45]  # three are left
    assert packed.batches == 4  # nine blocks


def test_an_epoch_has_every_block_once_and_the_next_one_another_order():
    packed = Packed([list(range(60))], length=5, size=3, seed=0)
    epochs = [torch.cat([packed.batch(4 * e + i) for i in range(4)]).tolist() for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12)) and epochs[0] != epochs[1]


def test_any_batch_is_known_without_those_before():
    one, other = (Packed([list(range(60))], length=5, size=3, seed=4) for _ in range(2))
    forwards = [one.batch(i).tolist() for i in range(10)]
    assert [other.batch(i).tolist() for i in reversed(range(10))] == forwards[::-1]
    assert Packed([list(range(60))], length=5, size=3, seed=5).batch(0).tolist() != forwards[0]


def test_too_few_tokens_are_refused():
    with pytest.raises(ValueError, match="^data: got 48 tokens, allowed: at least 60, those of one batch"):
        Packed(DOCUMENTS, length=20, size=3, seed=0)
    with pytest.raises(ValueError, match="^data: got 0 tokens"):
        Packed([], length=20, size=3, seed=0)
