"""Heads that walk through DFlash's block: the law, where a confidence head ends a sequence's drafts, and what is asked
of it."""

from __future__ import annotations

import functools

import pytest
import torch
import typer
from specdec import Request, Scheduler, SpeculativeDecoder, load_head
from specdec.cli.drafters import make_drafter
from specdec.cli.drafting import GenerateDrafts
from specdec.cli.models import ModelOptions
from specdec.drafters.heads.drafter import HeadDraftSession
from support.heads import V, predictable_target, random_head, write
from support.models import toy_model
from support.texts import check_text_distribution

from specdec_kernels import SamplingParams

nightly = functools.partial(pytest.param, marks=pytest.mark.nightly)
PROMPTS = [[1, 2, 3, 9, 9, 4], [5], [3, 3, 1, 2, 8, 1, 7, 0, 15, 4, 4]]
SAMPLED = {"params": SamplingParams(1.0), "seed": [3, 4, 5], "rule": "coupled"}


def toy_head(folder, kind: str, **arguments):
    config, tensors = random_head(kind, hidden=8, vocab=5)
    if kind == "dspark":  # sure of its second draft after some tokens
        tensors["confidence_head.proj.weight"] *= 8
        tensors["confidence_head.proj.bias"] += 2.3
    files = write(folder, config | {"selector_top_k": 4}, tensors)
    return load_head(files, toy_model(1), layer_ids=(0, 1), check=False, **arguments)


def head_of(folder, kind: str = "dspark", **arguments):
    return load_head(write(folder, *random_head(kind)), predictable_target(), check=False, **arguments)


def texts(drafter, num_drafts: int = 4, **settings):
    decoder = SpeculativeDecoder(predictable_target(), drafter, num_drafts)
    return decoder.generate(PROMPTS, max_new_tokens=24, eos_token_id=[], **settings)


@pytest.fixture
def steps(monkeypatch) -> list[tuple[torch.Tensor, torch.Tensor, list[int]]]:
    """Of each step of a head with a confidence: how sure it was of each draft, what was proposed, and what may be."""
    found, own = [], HeadDraftSession._sure

    def noted(session, drafts, step, sure):
        kept = own(session, drafts, step, sure)
        found.append((sure, kept.tokens, step.allowed_on_device.tolist()))
        return kept

    monkeypatch.setattr(HeadDraftSession, "_sure", noted)
    return found


# ---- the law -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "rule"),
    [("dflash2", "token"), ("domino", "block"), ("dspark", "token"), ("dspark", "block"),
     *(nightly(*both) for both in (("dflash2", "block"), ("domino", "token")))],
)  # fmt: skip
def test_sampled_texts_have_the_distribution_of_the_target(kind, rule, tmp_path, steps):
    """DSpark's drafts end where its head is not sure, which the drafts before decide."""
    more = {"confidence": 0.5} if kind == "dspark" else {}
    check_text_distribution(toy_model(1), toy_head(tmp_path, kind, **more), 10_000, rule=rule)
    counts = torch.cat([(tokens >= 0).sum(1) for _, tokens, _ in steps]) if more else torch.tensor([0, 1, 2])
    assert counts.bincount(minlength=3).min() > 0


@pytest.mark.parametrize("rule", ["token", "block"])
def test_what_withdraws_a_draft_because_of_what_it_is_is_found(rule, tmp_path, monkeypatch):
    own = HeadDraftSession._sure
    monkeypatch.setattr(
        HeadDraftSession, "_sure", lambda session, drafts, step, sure: own(session, drafts, step, drafts.tokens % 2.0)
    )
    with pytest.raises(AssertionError, match=r"^\d{4}"):  # chi-square, where 190 is the most
        check_text_distribution(toy_model(1), toy_head(tmp_path, "dspark", confidence=0.5), 10_000, rule=rule)


# ---- where drafts end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_end_before_the_first_of_which_the_head_is_not_sure(sampled, tmp_path, steps):
    settings = SAMPLED if sampled else {}
    plain, all_of = texts(None, 0, **settings), texts(head_of(tmp_path / "all"), **settings)
    assert not steps
    found = texts(head_of(tmp_path / "sure", confidence=0.6), **settings)
    assert found.tokens == all_of.tokens == plain.tokens and found.drafter_error is None
    assert 0 < found.stats.drafted < all_of.stats.drafted and found.stats.draft_forwards == len(steps)
    for sure, tokens, allowed in steps:
        going = (sure >= 0.6).tolist()
        expected = [(row + [False]).index(False) for row in going]
        # No more columns are verified than some row needs.
        assert tokens.shape[1] == max(min(pair) for pair in zip(expected, allowed, strict=True))
        for row, count in zip(tokens.tolist(), expected, strict=True):
            assert [token >= 0 for token in row] == [i < count for i in range(len(row))]
    widths = {tokens.shape[1] for _, tokens, _ in steps}
    assert len(widths) > 2


def test_a_head_that_is_never_sure_leaves_plain_decoding(tmp_path):
    result = texts(head_of(tmp_path, confidence=0.999999))
    assert result.tokens == texts(None, 0).tokens and result.stats.drafted == 0 < result.stats.draft_forwards


def test_sequences_that_begin_beside_others(tmp_path):
    """Where a sequence's drafts end does not depend on its company."""
    decoder = SpeculativeDecoder(predictable_target(), head_of(tmp_path, confidence=0.5), 4)
    requests = [Request([i + 1, *PROMPTS[i % 3]], 5 + 6 * i, seed=i, id=i) for i in range(4)]
    alone = {}
    for rows in (1, 2):
        scheduler = Scheduler(decoder, rows=rows, max_length=60, prefill_chunk=4, rule="coupled")
        told = {o.request.id: (o.tokens, o.stats.drafted, o.stats.accepted) for o in scheduler.run(requests)}
        assert scheduler.drafter_error is None
        alone = alone or told
    assert told == alone and sum(drafted for _, drafted, _ in told.values()) > 20


def test_where_all_candidates_are_banned_nothing_is_drafted(tmp_path):
    """A selector's q is 0 but for three tokens, and a ban may leave none of them."""
    drafter, banned = head_of(tmp_path, "dflash2"), [*range(3, V - 2)]
    settings = {**SAMPLED, "banned_tokens": banned}
    result = texts(drafter, **settings)
    assert result.tokens == texts(None, 0, **settings).tokens and result.drafter_error is None
    assert 0 < result.stats.drafted < texts(drafter, **SAMPLED).stats.drafted


# ---- what is asked -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "confidence"), [("dflash2", 0.5), ("dspark", 1.0), ("dspark", -0.1), ("dspark", "no head")]
)
def test_a_confidence_that_means_nothing_is_refused(kind, confidence, tmp_path):
    config, tensors = random_head(kind)
    if confidence == "no head":
        tensors = {name: t for name, t in tensors.items() if not name.startswith("confidence_head")}
        confidence = 0.5
    with pytest.raises(
        ValueError, match=rf"^confidence: got {confidence} with a head of the format '{kind}', allowed: a"
    ):
        load_head(write(tmp_path, config, tensors), predictable_target(), check=False, confidence=confidence)


@pytest.mark.filterwarnings("ignore:.*rarely accepted:RuntimeWarning")
def test_the_command_line_takes_a_heads_confidence(tmp_path):
    """Where the folder has such a head. What is no folder, and no model, is refused before anything is loaded."""
    options = GenerateDrafts(drafter=str(write(tmp_path, *random_head("dspark"))), confidence=0.5)
    options.check(ModelOptions(target="target"))
    assert make_drafter(options.drafter, predictable_target(), confidence=0.5).confidence == 0.5
    with pytest.raises(typer.BadParameter, match="^got 0.5 with --drafter suffix, allowed: 0, --drafter model, or the"):
        GenerateDrafts(drafter="suffix", confidence=0.5).check(ModelOptions(target="target"))
