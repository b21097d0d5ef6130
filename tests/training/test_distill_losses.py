"""Divergences of a draft from its target, against sums in float64; and what a mixture of losses is."""

from __future__ import annotations

import math

import pytest
import torch
from specdec.training.losses import DIVERGENCES, LOSSES, Wanted, loss_of, outcomes, read_mixture

ROWS, SIZE = 7, 11


@pytest.fixture
def logits() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (3 * torch.randn(ROWS, SIZE, generator=generator) for _ in range(2))
    return ours, theirs


def enumerated(name: str, q: list[float], p: list[float]) -> float:
    pairs = list(zip(q, p, strict=True))
    match name:
        case "forward_kl":
            return sum(b * math.log(b / a) for a, b in pairs)
        case "reverse_kl":
            return sum(a * math.log(a / b) for a, b in pairs)
        case _:
            return 1 - sum(min(a, b) for a, b in pairs)  # what is not accepted


@pytest.mark.parametrize("name", [*DIVERGENCES])
def test_divergences_are_their_sums(name, logits):
    ours, theirs = logits
    found = DIVERGENCES[name](*outcomes(ours, Wanted.of(theirs)))
    q, p = (x.double().softmax(-1).tolist() for x in logits)
    expected = [enumerated(name, a, b) for a, b in zip(q, p, strict=True)]
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-6)
    assert loss_of({name: 1.0}, ours, Wanted.of(theirs), torch.zeros(ROWS).long()).item() == pytest.approx(
        sum(expected) / ROWS, rel=1e-5
    )


@pytest.mark.parametrize("name", [*DIVERGENCES])
@pytest.mark.parametrize("top", [1, 3, SIZE - 1])
def test_the_others_are_one_outcome(name, top, logits):
    """What is known of the target is its most likely tokens and the mass of the rest."""
    ours, theirs = logits
    wanted = Wanted.of(theirs, top)
    assert wanted.ids is not None and wanted.log_p.shape == (ROWS, top + 1)
    found = DIVERGENCES[name](*outcomes(ours, wanted))
    q, p = (x.double().softmax(-1) for x in logits)
    for row in range(ROWS):
        best = p[row].argsort(descending=True)[:top]
        assert sorted(best.tolist()) == sorted(wanted.ids[row].tolist())
        a, b = ([*x[row][best].tolist(), 1 - x[row][best].sum().item()] for x in (q, p))
        assert found[row].item() == pytest.approx(enumerated(name, a, b), rel=1e-3, abs=1e-5)
    whole = DIVERGENCES[name](*outcomes(ours, Wanted.of(theirs)))
    assert (found <= whole + 1e-4).all()  # a lower bound
    if top == SIZE - 1:
        torch.testing.assert_close(found, whole, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [*DIVERGENCES])
@pytest.mark.parametrize("top", [0, 3])
def test_banned_tokens_and_certain_ones_have_gradients(name, top):
    """-inf in the target's logits, and a draft that gives all its mass to one token."""
    theirs = torch.tensor([[0.0, -torch.inf, 1.0, 2.0, -torch.inf]])
    ours = torch.tensor([[0.0, 300.0, 1.0, 2.0, 0.0]], requires_grad=True)
    loss = loss_of({name: 1.0}, ours, Wanted.of(theirs, top), torch.tensor([2]))
    loss.backward()
    assert loss.isfinite() and ours.grad.isfinite().all()


@pytest.mark.parametrize("name", [*DIVERGENCES])
@pytest.mark.parametrize("top", [0, 3])
def test_every_loss_leads_to_the_target(name, top):
    generator = torch.Generator().manual_seed(1)
    theirs = 2 * torch.randn(4, SIZE, generator=generator)
    ours = torch.zeros(4, SIZE, requires_grad=True)
    optimiser = torch.optim.Adam([ours], lr=0.05)
    for _ in range(600):
        optimiser.zero_grad()
        loss_of({name: 1.0}, ours, Wanted.of(theirs, top), torch.zeros(4).long()).backward()
        optimiser.step()
    wanted = Wanted.of(theirs, top)
    log_q, log_p = outcomes(ours.detach(), wanted)
    assert DIVERGENCES["total_variation"](log_q, log_p).max() < 0.03


def test_data_is_the_cross_entropy_and_mixtures_add(logits):
    ours, theirs = logits
    tokens = torch.arange(ROWS)
    entropy = -ours.double().log_softmax(-1)[torch.arange(ROWS), tokens].mean().item()
    assert loss_of({"data": 1.0}, ours, None, tokens).item() == pytest.approx(entropy, rel=1e-5)
    wanted = Wanted.of(theirs)
    parts = {name: loss_of({name: 1.0}, ours, wanted, tokens).item() for name in LOSSES}
    weights = dict(zip(LOSSES, (0.1, 0.2, 0.3, 0.4), strict=True))
    assert loss_of(weights, ours, wanted, tokens).item() == pytest.approx(
        sum(weights[name] * parts[name] for name in LOSSES), rel=1e-5
    )


def test_mixtures_are_read():
    assert read_mixture("loss", "data", LOSSES) == {"data": 1.0}
    assert read_mixture("loss", "data:1, forward_kl:3", LOSSES) == {"data": 0.25, "forward_kl": 0.75}


@pytest.mark.parametrize("given", ["", "kl", "data:0", "data:-1", "data:x", "data:inf", "data:nan", "data,data"])
def test_wrong_mixtures_are_refused(given):
    with pytest.raises(ValueError, match="^loss: got .*, allowed: each once, with a weight > 0: data"):
        read_mixture("loss", given, LOSSES)
