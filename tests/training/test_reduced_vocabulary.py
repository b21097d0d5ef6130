"""Drafts whose head covers some tokens only: what is kept, what it costs, and that they load and draft like others."""

from __future__ import annotations

import copy

import pytest
import torch
from specdec import SpeculativeDecoder
from specdec.models.load.loading import load_model
from specdec.models.load.reduced_head import reduce_head, reduced_ids
from specdec.training.held_out import worth, write
from specdec.training.losses import NO_COLUMN, loss_of
from specdec.training.reduced_vocabulary import columns_of, most_frequent, price
from support.models import VOCABULARY, prompts, tunable_pair

KEPT = torch.arange(0, VOCABULARY, 2)


@pytest.fixture
def pair():
    target, draft = tunable_pair(0.3)
    return target, copy.deepcopy(draft)


def test_the_most_frequent_tokens_are_kept():
    blocks = torch.tensor([[5, 5, 5, 2], [2, 9, 1, 1]])
    assert most_frequent(blocks, 12, 1).tolist() == [5]
    assert most_frequent(blocks, 12, 3).tolist() == [1, 2, 5]  # of equally frequent ones, the lowest
    assert most_frequent(blocks, 12, 3, always=[11]).tolist() == [1, 5, 11]
    assert most_frequent(blocks, 12, 12).tolist() == list(range(12))
    for wrong in (0, 13):
        with pytest.raises(ValueError, match=f"^vocabulary: got {wrong}, allowed"):
            most_frequent(blocks, 12, wrong)


def test_columns():
    columns, drafted = columns_of(torch.tensor([0, 3, 7, 9, 11]), torch.tensor([3, 7, 9]))
    assert drafted.tolist() == [False, True, True, True, False] and columns[1:4].tolist() == [0, 1, 2]
    assert (columns >= 0).all() and (columns < 3).all()
    same, all_of_them = columns_of(torch.tensor([4, 2]), None)
    assert same.tolist() == [4, 2] and all_of_them.all()


def test_its_logits_are_those_of_its_tokens(pair):
    tokens = torch.tensor(prompts(2, 7, 7))
    with torch.inference_mode():
        before = pair[1](tokens, use_cache=False).logits
        reduce_head(pair[1], KEPT)
        after = pair[1](tokens, use_cache=False).logits
    torch.testing.assert_close(after, before[..., KEPT])
    assert torch.equal(reduced_ids(pair[1]), KEPT) and reduced_ids(pair[0]) is None


def test_texts_stay_the_targets_and_the_draft_loads(pair, tmp_path):
    target, draft = pair
    reduce_head(draft, KEPT)
    given = prompts(3, 3, 8)
    plain = SpeculativeDecoder(target, None, 0).generate(given, max_new_tokens=20, eos_token_id=[])
    drafted = SpeculativeDecoder(target, draft, 3).generate(given, max_new_tokens=20, eos_token_id=[])
    assert drafted.tokens == plain.tokens and drafted.drafter_error is None and drafted.stats.accepted > 0
    draft.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "float32")
    assert torch.equal(reduced_ids(loaded), KEPT)
    again = SpeculativeDecoder(target, loaded, 3).generate(given, max_new_tokens=20, eos_token_id=[])
    assert again.tokens == plain.tokens and again.stats.accepted == drafted.stats.accepted
    half = load_model(tmp_path, "bfloat16")
    assert half.dtype == torch.bfloat16 and reduced_ids(half).dtype == torch.int64


def test_a_file_that_lacks_tensors_is_refused(pair, tmp_path):
    from safetensors.torch import load_file, save_file

    reduce_head(pair[1], KEPT)
    pair[1].save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("d2t", "model.norm.weight"):
        save_file({k: v for k, v in tensors.items() if k != name}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="^path: .*does not hold a causal language model"):
            load_model(tmp_path)


def test_worth_counts_tokens_that_it_cannot_draft_as_rejected(pair):
    target, draft = pair
    given = prompts(6, 3, 8)
    reduce_head(draft, KEPT)
    written = write(target, given, 20, 0)
    greedy = worth(draft, written, 3)[0]
    stats = SpeculativeDecoder(target, draft, 3).generate(given, max_new_tokens=20, eos_token_id=[]).stats
    assert (greedy.alpha, greedy.tau) == (pytest.approx(stats.alpha), pytest.approx(stats.tau))


def test_tokens_that_it_does_not_know_do_not_count_in_the_loss():
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    some = loss_of({"data": 1.0}, logits, None, torch.tensor([1, NO_COLUMN, 2]))
    assert some.item() == pytest.approx(loss_of({"data": 1.0}, logits[[0, 2]], None, torch.tensor([1, 2])).item())
    assert loss_of({"data": 1.0}, logits, None, torch.full((3,), NO_COLUMN)).item() == 0


def test_its_price(pair):
    found = price(pair[1], KEPT, [0, 2, 4, 5])
    assert found.kept == len(KEPT) and found.covered == 0.75 and 0.5 < found.weights < 1
    assert "loses up to 25.00%" in found.words


@pytest.mark.parametrize("ids", [[], [3, 3], [5, 4], [-1, 4], [4, VOCABULARY]])
def test_wrong_ids_are_refused(pair, ids):
    with pytest.raises(ValueError, match="^vocabulary: got"):
        reduce_head(pair[1], torch.tensor(ids, dtype=torch.int64))
