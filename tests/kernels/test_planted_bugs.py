"""Bugs that real systems have had are planted, and the chi-square cells find each of them."""

from __future__ import annotations

import pytest
import torch
from support.cells import DRAWS, ROWS, check, narrow_batch

from specdec_kernels.backends import reference
from specdec_kernels.testing import StepInputs


def is_found(rule, q, kind, settings, backend="reference", where=r"row \d: ", **more) -> None:
    batch = narrow_batch(rule, q, kind, settings)
    with pytest.raises(AssertionError, match=where):
        check(batch, backend, DRAWS // 25, **more)


def residual_is(monkeypatch: pytest.MonkeyPatch, residual) -> None:
    """Replaces the reference's residual by a function of p and q."""
    draw = reference._Verification.draw

    def other(self, weights, j, where):
        _, p = self.target_row(j)
        drafted, *_, q, _, _ = self.draft_row(j, torch.ones_like(self.greedy))
        changed = torch.where(drafted[:, None], residual(p.probability, q), p.probability)
        return draw(self, torch.where(weights.sum(-1, keepdim=True) > 0, changed, weights), j, where)

    monkeypatch.setattr(reference._Verification, "draw", other)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_shared_noise_of_draft_and_recovery_is_found(rule, monkeypatch):
    """vllm#54282: with one stream for both, the recovered token favours the tokens that the draft favoured."""
    monkeypatch.setattr(reference, "RECOVER_BLOCK", reference.DRAFT_BLOCK)
    monkeypatch.setattr(reference, "RECOVER_TOKEN", reference.DRAFT_TOKEN)
    is_found(rule, "stats", "opposite", "filters")


def test_recovery_from_p_is_found(monkeypatch):
    residual_is(monkeypatch, lambda p, q: p)
    is_found("token", "stats", "opposite", "filters")


def test_token_residual_in_block_is_found(monkeypatch):
    """max(p - q, 0) without the weight w of the prefix, which is always 1 only for the first draft."""
    residual_is(monkeypatch, lambda p, q: (p - q).clamp(min=0.0))
    is_found("block", "stats", "opposite", "filters", where="K = [23]")


def test_token_residual_in_token_is_not_found(monkeypatch):
    """The correct residual, planted in the same way, is not found, so the tests above find the bug and not the
    planting."""
    residual_is(monkeypatch, lambda p, q: (p - q).clamp(min=0.0))
    check(narrow_batch("token", "stats", "opposite", "filters"), "reference", DRAWS // 25)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_off_by_one_row_is_found(rule):
    """The bonus token is drawn from the row of the last draft."""

    def bug(inputs: StepInputs) -> StepInputs:
        rows = torch.arange(inputs.target_logits.shape[1]).clamp(max=inputs.target_logits.shape[1] - 2)
        return inputs.replace(target_logits=inputs.target_logits[:, rows])

    is_found(rule, "stats", "near_equal", "filters", "cpu", bug=bug)


def test_q_that_was_not_drawn_from_is_found():
    """Verification is given another q than the one that drafts were drawn from: here, a uniform one."""

    def bug(inputs: StepInputs) -> StepInputs:
        return inputs.replace(draft_logits=torch.zeros_like(inputs.draft_logits))

    is_found("token", "full", "opposite", "filters", "cpu", bug=bug)


@pytest.mark.parametrize("settings", ["filters", "tables"])
def test_settings_of_the_neighbour_are_found(settings):
    def bug(inputs: StepInputs) -> StepInputs:
        neighbour = inputs.map(lambda t: t.view(-1, ROWS, *t.shape[1:]).roll(1, 1).view_as(t))
        return inputs.replace(params=neighbour.params, table=neighbour.table)

    is_found("coupled", "stats", "near_equal", settings, "cpu", bug=bug)
